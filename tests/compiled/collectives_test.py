"""Collectives are counted with their bytes, mesh axes and times, in text and in real programs."""

import pytest

from moddepth_jax.compiled.collectives import collectives
from moddepth_jax.compiled.program import Program
from tests.devices import on_devices

MESH = {'data': 2, 'fsdp': 2, 'tensor': 2}


def program(*lines, extra=''):
    """A Program whose entry has these lines, and two inputs: f32[4,8] %p and bf16[4,8] %h."""
    body = '\n'.join(f'  {line}' for line in lines)
    return Program(f"""\
HloModule made_by_hand

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
{extra}
ENTRY %main (p: f32[4,8], h: bf16[4,8], i: s32[]) -> f32[4,8] {{
  %p = f32[4,8]{{1,0}} parameter(0)
  %h = bf16[4,8]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
{body}
}}
""")


def only(*lines, extra='', mesh=MESH):
    """The one Collective of such a program."""
    (run,) = collectives(program(*lines, extra=extra), mesh)
    return run.found


@pytest.mark.parametrize(
    ('groups', 'axes', 'size'),
    [
        ('{{0,2},{1,3},{4,6},{5,7}}', ('fsdp',), 2),
        ('{}', ('data', 'fsdp', 'tensor'), 8),
        ('[4,2]<=[8]', ('tensor',), 2),
        ('[4,2]<=[2,4]T(1,0)', ('data',), 2),
        ('[2,4]<=[2,2,2]T(1,0,2)', ('data', 'tensor'), 4),
        ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'data','tensor'}", ('data', 'tensor'), 4),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", ('tensor',), 2),
        ("mesh['x'=4,'y'=2], device_ids=([2,2,2]T(0,2,1)) {'x':(2)2}", ('tensor',), 2),
        ("mesh['x'=8] {'x':(2)2}", ('fsdp',), 2),
        ("mesh['x'=8] {'x':(2)4}", ('fsdp', 'tensor'), 4),
    ],
)
def test_groups_are_read_in_every_form(groups, axes, size):
    """Lists, iota with and without a transposition, and axes and parts of axes of a mesh."""
    found = only(
        f'ROOT %r = f32[4,8]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, '
        'use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(f)/psum" id=1}'
    )
    assert (found.axes, len(found.groups[0])) == (axes, size)
    assert sorted(sum(found.groups, ())) == list(range(8))
    assert found.sent_bytes == 2 * 128 * (size - 1) / size


BY_FOUR = 'channel_id=1, replica_groups=[2,4]<=[8]'


@pytest.mark.parametrize(
    ('line', 'sent_bytes'),
    [
        (f'f32[16,8] all-gather(%p), {BY_FOUR}, dimensions={{0}}', 384),
        (f'f32[1,8] reduce-scatter(%p), {BY_FOUR}, dimensions={{0}}, to_apply=%add', 96),
        (f'f32[4,8] all-reduce(%p), {BY_FOUR}, to_apply=%add', 192),
        (f'(f32[4,8], bf16[4,8]) all-reduce(%p, %h), {BY_FOUR}, to_apply=%add', 288),
        (f'f32[4,8] all-to-all(%p), {BY_FOUR}, dimensions={{0}}', 96),
        ('f32[4,8] collective-permute(%p), source_target_pairs={{0,4},{4,0},{1,1}}', 128),
    ],
)
def test_bytes_are_those_of_a_ring(line, sent_bytes):
    """Each kind by its formula, in a group of 4."""
    kind, found = line.split('(%')[0].split()[-1], only(f'%c = {line}')
    assert (found.kind, found.sent_bytes) == (kind, sent_bytes)
    assert found.axes == (('data',) if kind == 'collective-permute' else ('fsdp', 'tensor'))


def test_other_instructions_are_ignored_and_unknown_collectives_refused():
    """Groups of one device send nothing; an error names the kind or form that would be missed."""
    alone = '%a = f32[4,8] all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add'
    to_itself = '%b = f32[4,8] collective-permute(%p), source_target_pairs={{0,0},{1,1}}'
    assert collectives(program(alone, to_itself), MESH) == []
    for kind in ('collective-broadcast', 'all-to-all-start'):
        with pytest.raises(ValueError, match=kind):
            only(f'%c = f32[4,8] {kind}(%p), replica_groups={{{{0,1}}}}')
    with pytest.raises(ValueError, match='some_new_form'):
        only('%c = f32[4,8] all-reduce(%p), replica_groups=some_new_form')


WIDENING = """
%wide (q: bf16[4,8]) -> f32[4,8] {
  %q = bf16[4,8]{1,0} parameter(0)
  %c.1 = f32[4,8]{1,0} convert(%q)
  ROOT %c.2 = f32[4,8]{0,1} copy(%c.1)
}

%rounded (q.1: f32[4,8]) -> f32[4,8] {
  %q.1 = f32[4,8]{1,0} parameter(0)
  %c.3 = bf16[4,8]{1,0} convert(%q.1)
  ROOT %c.4 = f32[4,8]{1,0} convert(%c.3)
}
"""


@pytest.mark.parametrize(
    ('operand', 'width'),
    [
        ('f32[4,8] fusion(%h), kind=kLoop, calls=%wide', 2),
        ('f32[4,8] fusion(%p), kind=kLoop, calls=%rounded', 2),
        ('f32[4,8] convert(%h)', 2),
        ('f32[4,8] convert(%i)', 4),
    ],
)
def test_widened_numbers_count_as_16_bits(operand, width):
    """An array that was converted from bfloat16 just before a float32 collective counts 16 bits."""
    found = only(
        f'%x = {operand}',
        f'%c = (f32[4,8], f32[4,8]) all-reduce(%x, %p), {BY_FOUR}, to_apply=%add',
        extra=WIDENING,
    )
    assert found.sent_bytes == 1.5 * (32 * width + 32 * 4)


SLICING = """
%takes (q: f32[4,8], j: s32[]) -> f32[1,8] {
  %q = f32[4,8]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %c = f32[4,8]{1,0} copy(%q)
  ROOT %d = f32[1,8]{1,0} dynamic-slice(%c, %j, %j), dynamic_slice_sizes={1,8}
}
"""


FUSED = '%u = f32[1,8] fusion(%a, %i), kind=kLoop, calls=%takes'
SLICE = '%u = f32[1,8] dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,8}'
TURNED = '%t = f32[4,8] transpose(%a), dimensions={1,0}'
READ = '%v = f32[4,8] negate(%a)'


@pytest.mark.parametrize(
    ('lines', 'sliced'),
    [
        ([FUSED], True),
        ([SLICE], True),
        ([TURNED, SLICE.replace('%a', '%t')], True),
        ([SLICE, READ], False),
        ([], False),
    ],
)
def test_sums_that_are_only_sliced_are_found(lines, sliced):
    """Through a fusion, and for one of several arrays, but not if something else reads the sum."""
    plain = only(f'%a = f32[4,8] all-reduce(%p), {BY_FOUR}, to_apply=%add', *lines, extra=SLICING)
    assert plain.sliced_bytes == (192 if sliced else 0)
    both = only(
        f'%r = (f32[4,8], bf16[4,8]) all-reduce(%p, %h), {BY_FOUR}, to_apply=%add',
        '%a = f32[4,8] get-tuple-element(%r), index=0',
        '%b = bf16[4,8] get-tuple-element(%r), index=1',
        '%n = bf16[4,8] negate(%b)',
        *lines,
        extra=SLICING,
    )
    assert both.sliced_bytes == (192 if sliced else 0)


KNOWN = """
import json, jax, jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from moddepth_jax.compiled.collectives import by_axes, collectives
from moddepth_jax.compiled.program import Program

mesh = jax.make_mesh((2, 2, 2), ('data', 'fsdp', 'tensor'), (AxisType.Auto,) * 3)
BY_DATA = PartitionSpec('data')

def once(x):
    def outer(x, _):
        def inner(x, _):
            return 2 * lax.ppermute(x, 'data', [(0, 1), (1, 0)]), None
        return 0.5 * lax.scan(inner, lax.psum(x, 'fsdp'), None, length=3)[0], None
    x = lax.scan(outer, x, None, length=5)[0]
    gathered = lax.all_gather(x, 'tensor')
    scattered = lax.psum_scatter(x, ('data', 'tensor'), tiled=True)
    exchanged = lax.all_to_all(x, 'tensor', 0, 0, tiled=True)
    return x, gathered, scattered, exchanged

def loops(x):
    x = lax.while_loop(lambda x: x[0, 0] < 9, lambda x: lax.psum(x, 'fsdp') + 1, x)
    return lax.cond(x[0, 0] > 0, lambda x: lax.psum(2 * lax.psum(x, 'data'), 'data'),
                    lambda x: lax.psum(x, 'data'), x)

def half(x):
    return lax.psum(jnp.sin(x.astype(jnp.bfloat16)), 'tensor')

found = {}
for function, outputs in ((once, 4), (loops, 1), (half, 1)):
    specs = (BY_DATA,) * outputs if outputs > 1 else BY_DATA
    mapped = jax.shard_map(function, mesh=mesh, in_specs=BY_DATA, out_specs=specs, check_vma=False)
    options = {'xla_allow_excess_precision': False}
    lowered = jax.jit(mapped).lower(jax.ShapeDtypeStruct((16, 8), 'float32'))
    text = lowered.compile(compiler_options=options).as_text()
    found[function.__name__] = by_axes(collectives(Program(text), mesh.shape))
print(json.dumps(found))
"""


def test_collectives_of_known_programs():
    """shard_map determines what is communicated: in nested scans, unknown loops, and branches.

    The arrays have 8 rows of 8 on a device, 256 bytes.
    """
    found = on_devices(8, KNOWN)

    def brief(rows, *names):
        return {(row['axes'], row['kind']): tuple(row[name] for name in names) for row in rows}

    assert brief(found['once'], 'places', 'count', 'bytes', 'unknown_loops', 'branches') == {
        ('fsdp', 'all-reduce'): (1, 5, 5 * 256.0, 0, 0),
        ('data', 'collective-permute'): (1, 15, 15 * 256.0, 0, 0),
        ('tensor', 'all-gather'): (1, 1, 256.0, 0, 0),
        ('data+tensor', 'reduce-scatter'): (1, 1, 3 * 64.0, 0, 0),
        ('tensor', 'all-to-all'): (1, 1, 128.0, 0, 0),
    }
    assert brief(found['loops'], 'count', 'bytes', 'unknown_loops', 'branches') == {
        ('fsdp', 'all-reduce'): (1, 256.0, 1, 0),
        ('data', 'all-reduce'): (2, 512.0, 0, 2),
    }
    assert brief(found['half'], 'bytes') == {('tensor', 'all-reduce'): (128.0,)}
    assert [row['axes'] for row in found['once'][:2]] == ['data', 'fsdp']  # most bytes first
