# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which tokens each block selects
#
# In a routed block of a Mixture-of-Depths model, a router scores every token and only an eighth of
# the tokens are selected. The others skip the block. This notebook shows the selected tokens in a
# heatmap, by score and gate, by kind of text, and by the entropy of the model's next-token
# distribution. It also shows how well a causal rule finds them, and the effect of another rule and
# another capacity.
#
# Without a run of your own, the notebook trains a very small model. This takes half a minute on two
# CPU cores, and the complete notebook takes a minute. Such a model has hardly begun to learn: its
# pictures illustrate the method and are not results.

# %%
import dataclasses
import os
import pathlib
import shutil
import sysconfig
import tempfile

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display
from IPython.utils.capture import capture_output

from configs import mod_isoflop
from moddepth_jax.analysis.block_stats import rank_correlation
from moddepth_jax.analysis.heatmaps import plot_routing, routing_grid, routing_record
from moddepth_jax.analysis.inspection import inspect_tokens, totals
from moddepth_jax.analysis.token_classes import guess_language, token_classes
from moddepth_jax.data.pipeline import make_dataset, token_stream
from moddepth_jax.data.tokenizers.tokenizer import tokenizer_of
from moddepth_jax.hparams import from_config
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.training.loop import train
from moddepth_jax.training.saved_run import load_run

WORKDIR = os.environ.get('NOTEBOOK_WORKDIR')  # or the directory of a run of yours, as a string
STEPS = int(os.environ.get('NOTEBOOK_STEPS', 300))  # of the small run that is trained otherwise
TOKENS = int(os.environ.get('NOTEBOOK_TOKENS', 8192))  # of the text that is read

# %% [markdown]
# ## A run
#
# The small run trains on the bytes of sixty modules of Python's standard library. `config` is that
# of `python -m launch.train --config=configs/mod_isoflop.py:size=4x64`, for fewer steps, with fewer
# and shorter sequences.
# Change a knob here, such as `config.model.routing.capacity`, and run the notebook again.

# %%
folder = pathlib.Path(tempfile.mkdtemp())
if not WORKDIR:
    for path in sorted(pathlib.Path(sysconfig.get_path('stdlib')).glob('[a-p]*.py'))[:60]:
        shutil.copy(path, folder / f'{path.stem}.txt')
    config = mod_isoflop.get_config('size=4x64')
    config.flop_budget = 0.0
    config.training.num_steps = STEPS
    config.data.source = f'{folder}/*.txt'
    config.data.sequence_length = 128
    config.data.batch_size = 8
    config.evaluation.every = 0
    config.evaluation.num_batches = 1
    config.evaluation.final_batches = 4
    WORKDIR = folder / 'small'
    with capture_output(stderr=False):
        train(from_config(config), WORKDIR)

# %%
run = load_run(WORKDIR)
hparams, variables = run.hparams_of_stage, run.state.variables
tokenizer, rule = tokenizer_of(hparams.data, WORKDIR), causal_routing(hparams)
dataset = make_dataset(hparams.data, hparams.seed, tokenizer=tokenizer)
routed = hparams.model.routed_layers
length = hparams.data.sequence_length
documents = dataset.corpus.held_out
long = (document for document in documents if len(document) >= 4096)
document = next(long, None) or max(documents, key=len)
tokens_N = token_stream([document], dataset.tokenizer)[:TOKENS].astype(np.int32)
tokens_N = tokens_N[: len(tokens_N) // length * length]
tokens_BT = tokens_N.reshape(-1, length)
batch = {'tokens_BT': tokens_BT, 'segment_ids_BT': np.ones_like(tokens_BT)}
print(
    f'{pathlib.Path(WORKDIR).name}: {hparams.model.num_layers} layers of width '
    f'{hparams.model.d_model}, after {run.step} of {run.num_steps} steps; blocks {routed} are '
    f'routed\n{hparams.model.routing.num_selected(length)} of {length} tokens of a row selected in '
    f'training; here the causal rule "{rule}" decides, on {len(tokens_N):,} tokens of a held-out '
    'document'
)

# %% [markdown]
# ## The heatmap
#
# Each column is a token and each row a layer. Training selects the tokens with the highest scores
# of a sequence (top C). This depends on later tokens, which do not exist yet during generation. So
# evaluation and generation use a causal rule that decides for each token separately. Dark: the
# rule selects the token. Green: selected, but the cache is full. Orange: the rule does not select
# it, although it is among the top C. A good rule leaves little orange.

# %%
seen = inspect_tokens(variables, hparams, tokens_N, dataset.tokenizer, rule)
scores_RN, gates_RN = seen.routing.scores_BT, seen.routing.gates_BT
top_RN, selected_RN = seen.routing.top_c_BT, seen.routing.selected_BT
dropped_RN = seen.routing.dropped_BT
row, file = len(tokens_BT) // 2, folder / 'map.png'
end = slice((row + 1) * length - min(length, 96), (row + 1) * length)  # with context behind it
grid_LN = routing_grid(top_RN, selected_RN, hparams, dropped_RN)
plot_routing(grid_LN[:, end], seen.pieces[end], f'routing by {rule}', file)
display(Image(file))

# %% [markdown]
# ## Scores and gates
#
# Top: the router scores of all tokens, and of those in the top C. A router that has learned
# something separates the two. Bottom: the gate, a factor on what the block adds to a selected
# token. The gate `raw` is the score itself, which gives the router a gradient.

# %%
figure, panels = plt.subplots(
    2, len(routed), figsize=(1 + 3 * len(routed), 4.6), squeeze=False, layout='constrained'
)
for i, layer in enumerate(routed):
    above, below = panels[:, i]
    bins = np.histogram_bin_edges(scores_RN[i], 50)
    above.hist(scores_RN[i], bins, color='#c9ced6', label='all tokens')
    above.hist(scores_RN[i, top_RN[i]], bins, color='#1f5f8b', label='top C')
    below.hist(gates_RN[i, selected_RN[i]], 30, color='#1f5f8b')
    above.set(title=f'layer {layer}', xlabel='score of the router', yscale='log')
    below.set_xlabel('gate of selected tokens')
for axes in panels[:, 0]:
    axes.set_ylabel('tokens')
figure.legend(*panels[0, 0].get_legend_handles_labels(), loc='outside upper right', ncols=2)
plt.show()

# %% [markdown]
# ## How well the rule finds the top C
#
# Precision is the share of the selected tokens that are in the top C. Recall is the share of the
# top C that is selected. By chance, precision would be near the capacity and recall near the
# selected share. `dropped` tokens are selected by the rule but exceed
# `model.routing.cache_capacity`.

# %%
for layer, *arrays in zip(routed, selected_RN, top_RN, dropped_RN, strict=True):
    selected_N, top_N, dropped_N = arrays
    both = np.sum(selected_N & top_N)
    print(
        f'layer {layer}: selected {selected_N.mean():.1%}, precision '
        f'{both / max(selected_N.sum(), 1):.1%}, recall {both / max(top_N.sum(), 1):.1%}, '
        f'dropped {dropped_N.mean():.2%}'
    )

# %% [markdown]
# ## By kind of text
#
# The same tokens, grouped by what they are part of (for code, according to Python's lexer). The
# line is the selected share of all tokens. A router without any information would give every bar
# this length.

# %%
language = guess_language(b''.join(seen.pieces))
classes_N = token_classes(list(seen.pieces), language)
sums = totals(seen, classes_N)
classes = [row for row in sums['classes'] if row['tokens'] >= 20]
names = [f'{row["class"]} ({row["tokens"]})' for row in classes]
figure, panels = plt.subplots(
    1, len(routed), figsize=(1.5 + 3 * len(routed), 3.2), sharey=True, squeeze=False
)
for i, (axes, layer) in enumerate(zip(panels[0], routed, strict=True)):
    axes.barh(names, [100 * row['entered'][i] for row in classes], color='#1f5f8b')
    axes.axvline(100 * selected_RN[i].mean(), color='#d55e00', linewidth=1)
    axes.set(title=f'layer {layer}', xlabel='% of the tokens selected')
panels[0][0].set_ylabel(f'kind of token ({language})')
panels[0][0].invert_yaxis()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## By entropy
#
# If blocks process the tokens that need them, tokens that more blocks select should be harder. The
# plot shows the entropy of the next-token distribution by the number of routed blocks that selected
# the token. Half of the tokens lie in the box; the line is their median.

# %%
times_N = selected_RN.sum(axis=0)
counts = [count for count in range(len(routed) + 1) if (times_N == count).any()]
figure, axes = plt.subplots(figsize=(5, 3), layout='constrained')
axes.boxplot([seen.entropy_N[times_N == count] for count in counts], showfliers=False, widths=0.5)
labels = [f'{count}\n({np.sum(times_N == count)} tokens)' for count in counts]
axes.set_xticks(range(1, len(counts) + 1), labels)
axes.set(xlabel='routed blocks that selected the token', ylabel='entropy of the next token (nats)')
plt.show()
print(
    f'rank correlation {rank_correlation(times_N, seen.entropy_N):+.2f}; '
    f'{sums["enter_all"]:.1%} of the tokens are selected by every routed block, '
    f'{sums["enter_none"]:.1%} skip all of them'
)

# %% [markdown]
# ## Another rule
#
# `threshold` selects a token if its score exceeds a moving average of the C-th largest score, which
# training maintains. It has no parameters and needs only the scores. On the same sequences:

# %%
other = routing_record(variables, hparams, batch, 'threshold')
other_top_RN, other_RN = (a.reshape(len(routed), -1) for a in (other.top_c_BT, other.selected_BT))
for layer, selected_N, top_N in zip(routed, other_RN, other_top_RN, strict=True):
    both, per_row_B = np.sum(selected_N & top_N), selected_N.reshape(-1, length).sum(axis=1)
    print(
        f'threshold, layer {layer}: precision {both / max(selected_N.sum(), 1):.1%}, recall '
        f'{both / top_N.sum():.1%}, {per_row_B.min()} to {per_row_B.max()} tokens of a row'
    )
print(f'the two agree on {np.mean(selected_RN == other_RN):.1%} of all decisions')

# %% [markdown]
# ## One knob changed
#
# With twice the capacity and the same weights, which tokens would be selected next? Here top C
# decides. The model was not trained for this capacity. To train with another knob, change `config`
# above.

# %%
capacity = min(1.0, 2 * hparams.model.routing.capacity)
routing = dataclasses.replace(hparams.model.routing, capacity=capacity)
wider = dataclasses.replace(hparams, model=dataclasses.replace(hparams.model, routing=routing))
more = routing_record(variables, wider, batch, 'top_c')
title = f'top C at capacity {capacity:g} instead of {hparams.model.routing.capacity:g}'
grid_LT = routing_grid(more.top_c_BT[:, row], more.selected_BT[:, row], wider)
plot_routing(grid_LT[:, -min(length, 96) :], seen.pieces[end], title, file)
display(Image(file))
shutil.rmtree(folder)
