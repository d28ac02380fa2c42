"""Runs command lines of launch.train in one process, each up to where the checks are over.

python train_checks.py CASES RESULTS: CASES is JSON, a list of lists of arguments; RESULTS gets, for
each, its status, what it printed, and how much JAX lowered or compiled. A command line that passes
every check ends with the status PASSED where it would write into its workdir.
"""

import contextlib
import io
import json
import pathlib
import sys
import traceback

PASSED = 77


def main(cases, results):
    import jax
    from absl import app, flags
    from absl.testing import flagsaver

    from launch import train
    from moddepth_jax.training import loop

    compiled = []

    def listen(event, *_, **__):
        if event.endswith(('/jaxpr_to_mlir_module_duration', '/backend_compile_duration')):
            compiled.append(event)

    def reached(*_):
        sys.exit(PASSED)

    jax.monitoring.register_event_duration_secs_listener(listen)
    loop.open_workdir = reached
    # In place of app.run, which sets up a process once and for all.
    app.run = lambda main, flags_parser: sys.exit(main(flags_parser(sys.argv)))

    def run(arguments):
        sys.argv = ['launch.train', *arguments]
        before, saved = len(compiled), flagsaver.save_flag_values()
        printed = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(printed[0]), contextlib.redirect_stderr(printed[1]):
                try:
                    train.cli.run(train.main)
                except SystemExit as end:
                    status = end.code
                except Exception:
                    status = 1
                    traceback.print_exc()
        finally:
            flagsaver.restore_flag_values(saved)
            flags.FLAGS.unparse_flags()
        stdout, stderr = (text.getvalue() for text in printed)
        return {
            'status': status,
            'stdout': stdout,
            'stderr': stderr,
            'compiled': len(compiled) - before,
        }

    found = [run(arguments) for arguments in json.loads(pathlib.Path(cases).read_text())]
    before = len(compiled)
    jax.jit(lambda x: x + 1)(1)
    meter = len(compiled) - before
    pathlib.Path(results).write_text(json.dumps({'runs': found, 'meter': meter}))


if __name__ == '__main__':
    main(*sys.argv[1:])
