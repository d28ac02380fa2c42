# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Models at equal training FLOPs
#
# Is a model better, or did it only get more compute? An isoFLOP study answers this question. It
# fixes a budget of training FLOPs, trains several sizes of each model until the budget is spent,
# and compares the best sizes. A larger model takes fewer steps. This notebook compares the cost of
# a forward pass of Mixture-of-Depths and dense models, and shows how to read the figures of a
# study.
#
# It trains nothing and takes a few seconds. It opens the study in `results/cpu/`, or one of yours.

# %%
import os
import pathlib
import shutil
import tempfile

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display

import configs
from configs import study as study_config
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import forward_breakdown, forward_flops
from moddepth_jax.studies import fit, plots
from moddepth_jax.studies.plan import VARIANTS
from moddepth_jax.studies.store import read_study

ROOT = pathlib.Path(configs.__file__).parents[1]
WORKDIR = os.environ.get('NOTEBOOK_WORKDIR')  # or the directory of a study of yours, as a string

# %% [markdown]
# ## What a forward pass costs
#
# A multiply-add counts as 2 FLOPs. A routed block costs FLOPs only for the selected tokens, while
# its router and predictor read all tokens. So a Mixture-of-Depths model is cheaper than the dense
# model of the same size, and a dense model with as many FLOPs is shallower.

# %%
models = {}
for name in ('dense', 'mod', 'mod_0.5', 'every_0.125'):
    config = study_config.get_config('size=8x64')
    config.update_from_flattened_dict(VARIANTS[name].changes)
    models[name] = from_config(config)
length = models['dense'].data.sequence_length
costs = {name: forward_breakdown(hparams, 1, length) for name, hparams in models.items()}
total = sum(costs['dense'].values())
groups = {
    'blocks': ('projections', 'attention', 'mlp'),
    'router and predictor': ('router', 'predictor'),
    'head': ('head',),
}
figure, axes = plt.subplots(figsize=(8, 2.4), layout='constrained')
begin = np.zeros(len(costs))
labels = [VARIANTS[name].label for name in costs]
for (group, parts), colour in zip(groups.items(), ('#0072b2', '#d55e00', '#8a8d90'), strict=True):
    share = np.array([sum(cost[part] for part in parts) / total for cost in costs.values()])
    axes.barh(labels, share, left=begin, color=colour, label=group)
    begin += share
axes.bar_label(axes.containers[-1], [f'{value:.0%}' for value in begin], padding=3)
axes.set(
    xlabel='FLOPs of a forward pass over that of the dense model, 8 layers of 64', xlim=(0, 1.1)
)
axes.invert_yaxis()
axes.spines[['top', 'right']].set_visible(False)
axes.legend(frameon=False, loc='center left', bbox_to_anchor=(1, 0.5))
plt.show()
assert forward_flops(models['mod'], 1, length) < forward_flops(models['dense'], 1, length)

# %% [markdown]
# ## A study
#
# `python -m launch.isoflop` trains a study and writes `study.json`. `make study` runs one that
# fits a laptop; its results are committed and shown here.

# %%
folder = pathlib.Path(tempfile.mkdtemp())
place = pathlib.Path(WORKDIR or ROOT / 'results/cpu/study')
study = read_study(place)
steps = [row['steps'] for row in study['runs']]
print(place.name)
print(f'{len(study["runs"])} runs of {min(steps):,} to {max(steps):,} steps')
if min(steps) < 500:
    print('runs of fewer than 500 steps decide nothing')

# %% [markdown]
# ## Every run has spent its budget
#
# A run takes a whole number of steps, so it falls short of its budget by less than one step.

# %%
if study['kind'] == 'flops':
    spent = [row['total_flops'] / row['budget'] for row in study['runs']]
    print(f'training FLOPs over the budget: {min(spent):.4f} to {max(spent):.4f}')

# %% [markdown]
# ## Loss against parameters
#
# There is one panel per budget. Left of the minimum, a model is too small for its budget. Right of
# it, the model is so large that it gets too few steps. The parabola through the runs of a variant
# gives its optimum, marked by a star. A ring means that the best run is at the edge of the sizes,
# so the optimum is not enclosed. Compare only stars within a panel: they cost the same to train.
# Variants that ran at a single size are in the strip on the right. Dots are seeds; a difference
# below their spread means nothing. Small marks are the seed that chose the size. It flatters that
# size, so the parabola has its shape but goes through the mean of the other seeds.

# %%
plots.draw(study, folder)
display(Image(folder / 'loss_by_parameters.png'))

# %%
print(f'{"budget":>8}  {"model":<42} {"optimum":>10} {"nats":>7}')
for budget in study['budgets']:
    for name, details in study['variants'].items():
        rows = fit.select(study, name, budget)
        best, parabola = fit.optimum(rows), fit.fit(rows)
        note = '  fewer than three sizes' if parabola is None else ''
        note = note or '  not enclosed' * (not parabola.inside)
        if best is not None:
            label = details['label'][:42]
            print(f'{budget:8.1e}  {label:<42} {best.parameters:10,.0f} {best.loss:7.4f}{note}')

# %% [markdown]
# ## Loss against FLOPs of a forward pass
#
# The same runs, by what they cost to *use*. The cross at 1, 1 is the best dense model. Below the
# line: a lower loss after the same training FLOPs. Left of the line: fewer FLOPs per token at
# inference. Raposo et al. claim the lower left corner. The shallower dense model shows whether
# routing leads there, or merely fewer layers.

# %%
display(Image(folder / 'loss_by_flops.png'))

# %% [markdown]
# ## Loss during training
#
# Left: training loss by step. Right: its difference from the dense model after the same FLOPs.
# Bands show the range over seeds.

# %%
display(Image(folder / 'loss_by_steps.png'))

# %% [markdown]
# ## Seeds
#
# Every variant at its best size, best on top. Where bars overlap, another seed could change the
# order. `docs/claims.md` has a confidence interval and a verdict for each difference.

# %%
display(Image(folder / 'seeds.png'))
shutil.rmtree(folder)
