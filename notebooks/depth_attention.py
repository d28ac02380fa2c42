# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What attention along depth looks at
#
# In Mixture-of-Depths Attention (MoDA) every layer writes slots for each token: a key and a value.
# The heads of later layers attend to the slots of *the same token* in the same softmax as to the
# sequence. This notebook shows how the slots are laid out, how much attention each layer pays to
# them, and how much to the first token (the attention sink). It also compares training with that
# of a dense model.
#
# Without runs of your own, the notebook trains two very small models, with and without slots. The
# complete notebook takes a minute and a half on two CPU cores. The models have hardly begun to
# learn: their pictures illustrate the method and are not results.

# %%
import os
import pathlib
import shutil
import sysconfig
import tempfile

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display
from IPython.utils.capture import capture_output

from configs import moda
from moddepth_jax.analysis.depth_mass import depth_mass
from moddepth_jax.analysis.heatmaps import plot_depth_mass
from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.data.tokenizers.tokenizer import tokenizer_of
from moddepth_jax.hparams import from_config
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.model.flops import depth_readers, forward_breakdown
from moddepth_jax.training.loop import train
from moddepth_jax.training.metrics import read_metrics
from moddepth_jax.training.saved_run import load_run

WORKDIR = os.environ.get('NOTEBOOK_WORKDIR')  # or the directory of a MoDA run, as a string
BESIDE = os.environ.get('NOTEBOOK_BESIDE')  # and of a dense run on the same data, to compare with
STEPS = int(os.environ.get('NOTEBOOK_STEPS', 200))  # of the small runs that are trained without

# %% [markdown]
# ## Two runs
#
# The small runs train on the bytes of sixty modules of Python's standard library. `config` is that
# of `python -m launch.train --config=configs/moda.py`, with fewer layers. With `slots=none` it is
# the dense model. Change a knob here and run the notebook again.

# %%
folder = pathlib.Path(tempfile.mkdtemp())
if not WORKDIR:
    for path in sorted(pathlib.Path(sysconfig.get_path('stdlib')).glob('[a-p]*.py'))[:60]:
        shutil.copy(path, folder / f'{path.stem}.txt')
    for name, slots in (('moda', 'attention+ffn'), ('dense', 'none')):
        config = moda.get_config(f'size=4x64,slots={slots}')
        config.training.num_steps = STEPS
        config.data.source = f'{folder}/*.txt'
        config.evaluation.every = 0
        config.evaluation.num_batches = 1
        config.evaluation.final_batches = 4
        with capture_output(stderr=False):
            train(from_config(config), folder / name)
    WORKDIR, BESIDE = folder / 'moda', folder / 'dense'

# %%
run = load_run(WORKDIR)
hparams, variables = run.hparams_of_stage, run.state.variables
model, tokenizer = hparams.model, tokenizer_of(hparams.data, WORKDIR)
dataset = make_dataset(hparams.data, hparams.seed, tokenizer=tokenizer)
batch = dataset.held_out_batch(0)
print(
    f'{pathlib.Path(WORKDIR).name}: {model.num_layers} layers of width {model.d_model}, '
    f'{model.num_heads} query heads and {model.num_kv_heads} key/value heads, '
    f'after {run.step} of {run.num_steps} steps'
)

# %% [markdown]
# ## The slots
#
# With `slots='attention+ffn'` a layer writes two slots for each token. Slot `a` is the key and
# value of its attention, which exist anyway. Slot `f` is a key and value projected from the output
# of its mlp. A layer reads the slots of all earlier layers, so layer l reads 2 l of them. They are
# stored in one buffer `[L, B, T, K, H]`: slot, batch row, token, key/value head, head width. The
# last layer writes none, because no layer would read it.

# %%
mass = depth_mass(variables, hparams, batch, causal_routing(hparams))
length = hparams.data.sequence_length
readers = list(depth_readers(hparams, length, 'top_c'))
for layer, (_, visible, written) in zip(mass.layers, readers, strict=True):
    shown = ' '.join(mass.slots[written - visible : written])
    print(f'layer {layer} sees {visible:2d} slots  {shown}')
parts = forward_breakdown(hparams, 1, length)
slots = parts['depth_projections'] + parts['depth_attention']
print(f'they cost {slots / sum(parts.values()):.1%} of the FLOPs of a forward pass')

# %% [markdown]
# ## How much attention goes to them
#
# Left: each row is a layer that reads and each column a slot. The colour is the share of the
# softmax, averaged over heads and tokens. Right: the sum over slots, and the share on the first
# token of the text. The cell after the figure also prints the share that uniform attention would
# give to slots: a token attends to itself and to all earlier tokens of its document in the window.
# A routed block attends only to those that it selects, so its share would be higher.

# %%
plot_depth_mass(mass, 'attention on the slots of earlier layers', folder / 'mass.png')
display(Image(folder / 'mass.png'))

# %%
segments_BT, places_T = batch['segment_ids_BT'], np.arange(length)
begins_BT = (np.diff(segments_BT, axis=1, prepend=0) > 0) & (not model.across_documents)
firsts_BT = np.maximum.accumulate(np.where(begins_BT, places_T, 0), axis=1)
keys_N = (places_T - firsts_BT + 1)[segments_BT > 0]
rows = zip(mass.layers, mass.depth_L, readers, model.block_order, strict=False)
for layer, found, (_, visible, _), block in rows:
    even = np.mean(visible / (visible + np.minimum(keys_N, model.window(block) or length)))
    print(f'layer {layer}: {found:6.1%} on slots; {even:6.1%} if attention were uniform')

# %% [markdown]
# ## Compared with the dense model
#
# Left: the training loss after the same steps on the same batches. Each point is a mean over the
# logged steps since the previous point. Right: the loss of MoDA minus that of the dense model,
# below 0 where MoDA is better. Slots cost parameters and FLOPs; the legend gives the FLOPs. One
# pair of runs is not a comparison, since seeds may differ by as much. `docs/claims.md` compares
# over seeds, and with a dense model that has as many parameters.

# %%
curves = {}
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3), layout='constrained')
for workdir, name, colour in ((BESIDE, 'dense', '#1d1f21'), (WORKDIR, 'MoDA', '#0072b2')):
    if not workdir:
        continue
    other, metrics = load_run(workdir).hparams, read_metrics(workdir)
    rows = [row for row in metrics if 'loss' in row]
    groups = np.array_split(np.arange(len(rows)), min(30, len(rows)))
    steps = [rows[group[-1]]['step'] for group in groups]
    curves[name] = steps, np.array([np.mean([rows[i]['loss'] for i in group]) for group in groups])
    flops = sum(forward_breakdown(other, 1, length).values())
    label = f'{name}: {flops / length / 1e3:,.0f} kFLOPs a token, forward'
    left.plot(*curves[name], '.-', color=colour, label=label)
    end = [row for row in metrics if 'eval/loss' in row][-1]
    print(f'{name}: {end["eval/bits_per_byte"]:.3f} held-out bits per byte at step {end["step"]}')
if len(curves) == 2 and curves['MoDA'][0] == curves['dense'][0]:
    right.plot(steps, curves['MoDA'][1] - curves['dense'][1], '.-', color='#0072b2')
right.axhline(0, color='#1d1f21', linewidth=1)
left.set(xlabel='steps', ylabel='training loss (nats per token)')
right.set(xlabel='steps', ylabel='difference (nats per token)')
left.legend(frameon=False)
plt.show()


# %% [markdown]
# ## The sink
#
# The share of attention on the first token of the document, by layer, for both models. Heads put
# attention there that they do not need elsewhere. Slots offer another place for it; whether a
# trained model uses them so is an empirical question.

# %%
if BESIDE:
    plain = load_run(BESIDE)
    rule = causal_routing(plain.hparams_of_stage)
    without = depth_mass(plain.state.variables, plain.hparams_of_stage, batch, rule)
    print('layer     ' + ' '.join(f'{layer:>6}' for layer in mass.layers))
    for name, found in (('dense', without), ('MoDA', mass)):
        print(f'{name:<9} ' + ' '.join(f'{share:>6.1%}' for share in found.first_token_L))
shutil.rmtree(folder)
