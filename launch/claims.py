"""Judges the papers' claims by the studies on disk; every verdict follows from a stated rule.

python -m launch.claims --workdir=runs/study
python -m launch.claims --workdir=results --page=docs/claims.md
python -m launch.claims --workdir=results --blind=200

--workdir is a study of launch.isoflop with study.json and measures.json, or a directory with
several studies at most three levels down. claims.json and claims.md go to --out. --page also writes
the table between the two markers of a file (see docs/claims.md). --blind measures how often the
rules give a verdict on evidence without differences.
"""

import json
import pathlib

from absl import flags

from launch import cli

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of one study or more.', required=True)
OUT = flags.DEFINE_string('out', None, 'Directory for the results. Default: --workdir.')
BLIND = flags.DEFINE_integer(
    'blind', 0, 'Only permute the labels of variants this many times and count verdicts.', 0
)
PAGE = flags.DEFINE_string('page', None, 'Also write the table between the markers of this file.')


def main(_):
    from moddepth_jax.studies.folders import find_studies

    find_studies(WORKDIR.value)  # fails before JAX is imported

    from launch.counted import counted_flops
    from moddepth_jax.data.directory import write_atomically
    from moddepth_jax.studies import blind, claims
    from moddepth_jax.training.tables import replace_between

    evidence = claims.read_evidence(WORKDIR.value, counted_flops())
    if BLIND.value:
        print(blind.blind_check(evidence, BLIND.value))
        return
    judged = claims.judge(evidence)
    rows = claims.fill(judged, evidence)
    table = claims.markdown(rows, judged, evidence)
    page = pathlib.Path(PAGE.value) if PAGE.value else None
    try:  # fails before anything is written
        text = page.read_text(encoding='utf-8') if page else ''
        text = replace_between(text, claims.BEGIN, claims.END, table) if page else ''
    except ValueError as error:
        raise ValueError(f'--page={page}: {error}') from None
    out = cli.make_directory('out', OUT.value or WORKDIR.value)
    write_atomically(out / 'claims.json', json.dumps(rows, indent=1, ensure_ascii=False) + '\n')
    write_atomically(out / 'claims.md', f'# Claims\n\n{table}\n')
    if page:
        write_atomically(page, text)
    for row in rows:
        print('{claim}\n  paper: {paper}\n  ours:  {ours}\n  {verdict}: {reason}'.format_map(row))
    print(f'{claims.summary(rows)} Rules and spreads: {out}/claims.md')


if __name__ == '__main__':
    cli.run(main)
