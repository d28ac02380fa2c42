"""The other side of benchmarks/runner.py: runs the cases that it is sent, and answers each."""

import gc
import importlib
import json
import os
import sys
import time
import traceback


class WrongError(Exception):
    """A result is not right; the message says which, and by how much."""


class SkippedError(Exception):
    """This device cannot do it; the message says why."""


INJECTIONS = ('crash', 'hang', 'wrong')
_OURS = ('configs', 'kernels_pallas', 'launch', 'moddepth_jax')


def serve(cases: dict, on_gpu: bool, injected: dict[str, str]):
    """Answers for each line of standard input, a name, with a line of JSON on standard output.

    Whatever else is printed goes to standard error.

    Args:
      cases: runner.Case by name.
      on_gpu: nothing runs where JAX has no GPU.
      injected: of INJECTIONS, by name of a case: what is done to it, to test the runner.
    """
    answers = os.fdopen(os.dup(1), 'w', encoding='utf-8')
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def send(row):
        print(json.dumps(row), file=answers, flush=True)

    send({'status': 'ready'})
    for line in sys.stdin:
        print(f'--- {line.strip()}', file=sys.stderr, flush=True)
        send(_run(cases[line.strip()], on_gpu, injected.get(line.strip())))


def _run(case, on_gpu, injected):
    """What became of a case."""
    if injected == 'crash':
        os.abort()
    if injected == 'hang':
        time.sleep(1e6)
    if on_gpu and case.in_process:
        import jax

        if jax.default_backend() != 'gpu':
            return {'lost': f'JAX has no GPU any more, it sees {jax.devices()[0]}'}
    module, _, name = case.run.partition(':')
    try:
        function = getattr(importlib.import_module(module), name)
        bent = {'bent': True} if injected == 'wrong' else {}
        return {'status': 'ok', **function(**case.arguments, **bent)}
    except WrongError as error:
        return {'status': 'wrong', 'reason': str(error)}
    except SkippedError as error:
        return {'status': 'skipped', 'reason': str(error)}
    except ModuleNotFoundError as error:
        if (error.name or '').split('.')[0] in _OURS:
            return _failed(error, case)
        why = f'no Python module {error.name}; docs/gpu.md says how to carry it'
        return {'status': 'missing', 'reason': why}
    except Exception as error:
        return _failed(error, case)
    finally:
        gc.collect()


def _failed(error, case):
    """A row for an error, `ends` where the device answers no more."""
    traceback.print_exception(error)
    if not case.in_process:
        return {'status': 'failed', 'reason': f'{type(error).__name__}: {error}'[:240]}
    import jax.numpy as jnp

    from moddepth_jax.benchmarks.timing import reason

    if isinstance(error, ValueError) and 'cannot:' in str(error):
        return {'status': 'skipped', 'reason': ' '.join(str(error).split())[:240]}
    row = {'status': 'failed', 'reason': reason(error)}
    try:
        (jnp.zeros(8) + 1).block_until_ready()
    except Exception:
        row['ends'] = True
    return row
