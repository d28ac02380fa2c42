"""The text of a compiled program is parsed: how often instructions run, and matrix products."""

import jax
import pytest

from moddepth_jax.compiled.program import Program, arrays, product_flops

NESTED = """\
HloModule made_by_hand, is_scheduled=true, num_partitions=1

%leaf (p.0: f32[2]) -> f32[2] {
  %p.0 = f32[2]{0} parameter(0)
  ROOT %mark.0 = f32[2]{0} negate(%p.0)
}

%inner_body (p.1: f32[2]) -> f32[2] {
  %p.1 = f32[2]{0} parameter(0)
  ROOT %call.1 = f32[2]{0} call(%p.1), to_apply=%leaf
}

%inner_condition (p.2: f32[2]) -> pred[] {
  %p.2 = f32[2]{0} parameter(0)
  %mark.2 = f32[2]{0} negate(%p.2), metadata={op_name="a b=c{d}"}
  ROOT %true = pred[] constant(true)
}

%outer_body (p.3: f32[2]) -> f32[2] {
  %p.3 = f32[2]{0} parameter(0)
  ROOT %while.3 = f32[2]{0} while(%p.3), condition=%inner_condition, body=%inner_body, \
backend_config={"known_trip_count":{"n":"3"}}
}

%outer_condition (p.4: f32[2]) -> pred[] {
  %p.4 = f32[2]{0} parameter(0)
  ROOT %false = pred[] constant(false)
}

%dear (p.5: f32[2]) -> f32[2] {
  %p.5 = f32[2]{0} parameter(0)
  %call.5 = f32[2]{0} call(%p.5), to_apply=%leaf
  ROOT %mark.5 = f32[2]{0} negate(%call.5)
}

%folded (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %mark.6 = f32[] negate(%a)
}

ENTRY %main (p: f32[2], i: s32[]) -> f32[] {
  %p = f32[2]{0} parameter(0)
  %i = s32[] parameter(1)
  %while.7 = f32[2]{0} while(%p), condition=%outer_condition, body=%outer_body OUTER
  CONDITIONAL
  %zero = f32[] constant(0)
  ROOT %reduce.7 = f32[] reduce(%choice, %zero), dimensions={0}, to_apply=%folded
}
"""
CHOICE = '%choice = f32[2]{0} conditional(%i, %while.7, %while.7), '
SWITCH = CHOICE + 'branch_computations={%leaf, %dear}'
IF = CHOICE + 'true_computation=%dear, false_computation=%leaf'


@pytest.mark.parametrize('conditional', [SWITCH, IF], ids=['switch', 'if'])
@pytest.mark.parametrize(
    ('trips', 'times'), [(', backend_config={"known_trip_count":{"n":"5"}}', 5), ('', None)]
)
def test_loops_multiply_and_the_most_expensive_branch_counts(conditional, trips, times):
    """Nested loops multiply, a condition runs once more; a loop of unknown length counts once.

    The function of a reduction is no computation that runs.
    """
    program = Program(NESTED.replace(' OUTER', trips).replace('CONDITIONAL', conditional))

    def search(instruction, computation):
        return (computation, instruction.name) if instruction.op == 'negate' else None

    found = {}
    for run in program.runs(search, cost=lambda _: 1):
        found.setdefault(run.found, []).append(tuple(run)[1:])
    outer = times or 1
    assert found == {
        ('leaf', 'mark.0'): [(3 * outer, times is not None, False), (1, True, True)],
        ('inner_condition', 'mark.2'): [(4 * outer, times is not None, False)],
        ('dear', 'mark.5'): [(1, True, True)],
    }


def test_program_texts_are_parsed_or_refused():
    """Tuples are parsed without layouts, a token is not an array, lowered programs are refused."""
    text = '((bf16[2,3]{1,0:T(8,128)(2,1)}, s4[]), /*index=2*/pred[7]{0}, f8e4m3fn[1], token[])'
    assert arrays(text) == [(16, (2, 3)), (4, ()), (8, (7,)), (8, (1,))]
    with pytest.raises(ValueError, match='not a compiled program'):
        Program(jax.jit(lambda x: x + 1).lower(1.0).as_text())


def test_products_of_a_compiled_program_are_counted_by_hand():
    """Batched, contracted over two axes, in a scan, and the larger of two branches."""

    def step(x, w):
        x = jax.lax.scan(lambda x, _: (x @ w @ w.T, None), x, None, length=5)[0]
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w.T @ w, lambda x: x @ w, x)

    shapes = (jax.ShapeDtypeStruct(shape, 'float32') for shape in ((16, 32), (32, 64)))
    program = Program(jax.jit(step).lower(*shapes).compile().as_text())
    one = 2 * 16 * 32 * 64
    assert product_flops(program) == (5 * 2 * one + 3 * one, 3 * one)
