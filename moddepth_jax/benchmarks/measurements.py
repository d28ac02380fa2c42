"""What model.attention=auto measured on a machine, carried in the results to the next one."""

from kernels_pallas.autotune import cache_folder


def collect() -> dict[str, str]:
    """Texts of the files that the choice of attention has written, by name."""
    files = (cache_folder() / 'attention').glob('*.json')
    return {path.name: path.read_text(encoding='utf-8') for path in sorted(files)}


def restore(rows) -> int:
    """Writes files that rows of results hold and this machine lacks; returns how many.

    What was measured on another kind of GPU or with other kernels has another name or key, and is
    not read.

    Args:
      rows: of results; those that have any hold what `collect` found under `measurements`.
    """
    folder, written = cache_folder() / 'attention', 0
    for row in rows:
        for name, text in row.get('measurements', {}).items():
            path = folder / name
            if not path.exists() and path.parent == folder and path.suffix == '.json':
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding='utf-8')
                written += 1
    return written
