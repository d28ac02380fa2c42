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
# Is a model better, or did it only get more compute? An isoFLOP study answers that: it fixes a
# budget of training FLOPs, trains several sizes of each model until exactly that much is spent, and
# compares the best sizes. A larger model takes fewer steps. This notebook shows what a forward pass
# of a Mixture-of-Depths model costs compared with a dense one, and how to read a study's figures.
#
# It trains nothing and takes some seconds. It opens the study in `results/cpu/`, or one of yours.

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
# A multiply-add counts as 2. A routed block costs FLOPs for the selected tokens only; its
# router and predictor read all of them. So a Mixture-of-Depths model is cheaper than the dense
# model of the same size, and a dense model of as many FLOPs is shallower.

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
# `python -m launch.isoflop` trains one and writes `study.json`; `make study` is the laptop's. The
# formula that replaces training if there is no study has the form of scaling laws: a floor, a
# term that falls with the FLOPs per token, and one that falls with the tokens. In it routing
# neither helps nor harms: all models lie on one curve over FLOPs.

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
# Runs take whole steps, so a run falls short by less than one step.

# %%
if study['kind'] == 'flops':
    spent = [row['total_flops'] / row['budget'] for row in study['runs']]
    print(f'training FLOPs over the budget: {min(spent):.4f} to {max(spent):.4f}')

# %% [markdown]
# ## Loss against parameters
#
# One panel for each budget. Left of the valley a model is too small for what it may spend, right of
# it it is so large that it gets too few steps. The parabola through the runs of a model gives its
# optimum, a star; a ring means that the best run lies at the edge, so that the optimum was not
# enclosed. Compare only stars of one panel: they cost the same to train. Models that ran at one
# size only stand in the strip at the right. Small dots are seeds: a difference smaller than their
# spread means nothing.

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
# line: better than it after equal training. Left of it: cheaper at every token from then on. What
# Raposo et al. claim is the lower left corner. The shallower dense model shows whether routing
# leads there, or just fewer layers.

# %%
display(Image(folder / 'loss_by_flops.png'))

# %% [markdown]
# ## Loss during training
#
# Left, training loss by step; right, its difference to the dense model after the same FLOPs.
# Bands are the range of the seeds.

# %%
display(Image(folder / 'loss_by_steps.png'))

# %% [markdown]
# ## Seeds
#
# Every model at its best size, best on top. Where bands overlap, another seed could change the
# order. `docs/claims.md` has a confidence interval and a verdict for each difference.

# %%
display(Image(folder / 'seeds.png'))
shutil.rmtree(folder)
