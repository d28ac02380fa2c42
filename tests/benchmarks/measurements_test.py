"""What one machine measured for model.attention=auto is there on the next."""

from moddepth_jax.benchmarks import measurements


def test_measurements_travel_in_the_results(tmp_path, monkeypatch):
    """Files that are there stay as they are; a name that leads elsewhere is not written."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'one'))
    folder = tmp_path / 'one/moddepth_jax/attention'
    folder.mkdir(parents=True)
    (folder / 'H200-a.json').write_text('{"a": 1}')
    (folder / 'H200-a.lock').write_text('')
    rows = [{'measurements': measurements.collect()}, {}]
    assert rows[0] == {'measurements': {'H200-a.json': '{"a": 1}'}}
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'two'))
    rows.append({'measurements': {'../../x.json': '{}', 'H200-a.json': '{"b": 2}'}})
    assert measurements.restore(rows) == 1 and measurements.restore(rows) == 0
    assert measurements.collect() == rows[0]['measurements']
    assert not (tmp_path / 'two/x.json').exists()
