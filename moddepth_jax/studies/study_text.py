"""What the page of a study tells beside its numbers: fixed texts and its style sheet, as HTML."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d1f21; --paper: #ffffff; --grid: #d8dadc;
  --soft: #f4f5f6; --faint: #5b6166; --warn: #fff4d6; --edge: #d39e00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #15181b; --grid: #343a3f;
  --soft: #1e2226; --faint: #a2a9af; --warn: #33290f; --edge: #b58a14; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h3 { font-size: 1rem; margin-bottom: .4rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--grid); }
p, li { max-width: 46rem; }
.faint, figcaption { color: var(--faint); font-size: .92rem; }
.warn { background: var(--warn); border-left: 4px solid var(--edge); padding: .5rem 1rem; }
.warn ul { margin: .3rem 0; padding-left: 1.2rem; }
figure { margin: 1.4rem 0; }
figure svg { width: 100%; height: auto; }
figcaption { max-width: 46rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .5rem; text-align: left; border-bottom: 1px solid var(--grid);
  white-space: nowrap; }
th { background: var(--soft); vertical-align: bottom; white-space: normal; }
.n { text-align: right; }
td.long { white-space: normal; }
.sortable { font-size: .78rem; }
.sortable th { cursor: pointer; }
.sortable th, .sortable td { padding: .2rem .32rem; }
td.bad { background: var(--warn); }
code { font-size: .88em; overflow-wrap: anywhere; }
@media print { :root { --ink: #000; --paper: #fff; --grid: #bbb; --soft: #eee; --faint: #333; }
  body { max-width: none; margin: 0; font-size: 11px; } figure, tr { break-inside: avoid; }
  .wide { overflow: visible; } table { font-size: 8px; } th, td { padding: .1rem .25rem; } }
"""

# A click on a heading sorts by its column; without scripts the table just stays as it is.
SORTING = """
for (const table of document.querySelectorAll('table.sortable')) {
  table.tHead.addEventListener('click', event => {
    const head = event.target.closest('th');
    if (!head) return;
    const up = head.dataset.up = head.dataset.up === '1' ? '0' : '1';
    const key = row => row.cells[head.cellIndex].dataset.v ?? row.cells[head.cellIndex].textContent;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)], both = x !== '' && y !== '' && !isNaN(x) && !isNaN(y);
      return (both ? x - y : x.localeCompare(y)) * (up === '1' ? 1 : -1);
    });
    table.tBodies[0].append(...rows);
  });
}
"""

MOD = """<p>In a <b>Mixture-of-Depths</b> (MoD) transformer some blocks are <b>routed</b>: such a
block processes only a fixed share of the tokens of a text, say 12.5%, and the others pass it by
unchanged on the residual stream. A small router, trained along with the model, scores every token;
the best-scored ones enter. So a forward pass costs less, and a given amount of computation buys
more training steps or a larger model
(<a href="https://arxiv.org/abs/2404.02258">Raposo et al. 2024</a>).</p>
"""

MODA = """<p>In <b>Mixture-of-Depths Attention</b> (MoDA) the attention of a layer sees, besides the
tokens before it, what earlier layers stored about its own token. Each layer leaves a key and a
value, called a slot, of its attention and, if asked for, of its mlp. All share one softmax, so a
head can look back along the text or down along the depth
(<a href="https://arxiv.org/abs/2603.15619">Zhu et al. 2026</a>).</p>
"""

EXPERTS = """<p><b>Experts.</b> In place of one wide mlp a layer has many narrow ones, and each
token passes a few that a router chooses for it. MoDE joins them with Mixture-of-Depths: in the
<i>staged</i> form a routed block contains experts, in the <i>integrated</i> form some of the
experts do nothing, and a token that is given these skips the mlp.</p>
"""

EQUAL_FLOPS = """<p><b>Equal FLOPs.</b> Every run of a budget spends the same number of training
FLOPs. The FLOPs of one step are counted from the model's shapes, and the number of steps is the
budget divided by them, so a cheaper model trains for more steps, on more text. Each learning-rate
schedule ends with its run. A step counts as three forward passes. A forward pass counts two FLOPs
for each multiply-add of all matrix products, on the tokens that a block really processes; attention
counts the causal half of its pairs. Routers and the output layer count, the lookup of embeddings
does not, and nothing is counted twice where it is recomputed to save memory.</p>
"""

EQUAL_STEPS = """<p><b>Equal tokens.</b> Every run of a budget trains for the same number of steps,
on equally many tokens. Its FLOPs then differ: they are in the table, and the second figure has them
on its axis. They are counted from the model's shapes, two for each multiply-add of all matrix
products and the causal half of attention; a step counts as three forward passes.</p>
"""

CAUSAL = """<p><b>Causal routing.</b> In training, a routed block takes the best-scored tokens of a
whole row of text (top-C). Whether a token is among them depends on tokens that come after it, so
this selection cannot be used to generate text, and a loss measured with it belongs to no model that
could. Evaluation therefore lets each token decide by itself, by a rule trained along with the
model. <b>Every held-out loss on this page is that causal one</b>; the loss by top-C stands beside
it in the table. Their difference is the routing gap: up to 0.01 nats is negligible, and from 0.05
nats on the run does not count.</p>
"""

SHALLOW = """<p><b>The controls.</b> A routed model is cheaper than the dense model of its size, but
so is a dense model with fewer layers. The <i>shallower dense</i> control has as many layers as make
its forward pass cost what that of MoD costs (12.5%, every other block). <i>Random</i> routing lets
random tokens enter: if a trained router does not beat it, it has learned nothing.</p>
"""

FIGURES = {
    'loss_by_parameters': (
        'Loss against model size',
        """One panel for each budget. A mark is a model size, at its mean over seeds; small dots are
        the seeds. Lower is better. Models too small lack capacity, models too large get too few
        steps, so the loss has a minimum in between. A parabola in the logarithm of the parameters
        runs through the means of each variant that ran at three sizes or more; a star marks its
        minimum. A ring means that the lowest loss lies at the smallest or largest size, so the
        optimum may lie beyond. Variants that ran at one size stand in the strip at the right, on
        the same axis; a number with an arrow is a loss above the panel. Other marks that
        would cover each other stand aside, with a line to their place.""",
    ),
    'loss_by_flops': (
        'Loss against the cost of a forward pass',
        """The loss of every run, divided by that of the reference at its optimum in the same
        budget (dashed lines: 1), against the FLOPs of a forward pass, divided likewise. Marks below
        the horizontal line are better than the reference, marks left of the vertical line are
        cheaper to run. Below and left is where a routed model should be. Marks that would
        cover each other stand aside, with a line to their place.""",
    ),
    'loss_by_steps': (
        'Loss during training',
        """The largest budget, each variant at its best size. Left: training loss against steps. A
        cheaper model makes more steps, so its curve is longer. Right: how far the curve is above or
        below the reference after the same training FLOPs, or, where budgets are steps, after the
        same steps. Lines are means and bands the range over
        all seeds. Routed models are <em>trained</em> with top-C, which sees the future: only the
        held-out losses of the other figures are causal.""",
    ),
    'seeds': (
        'Every seed',
        """Each variant at its best size, the lowest mean on top. Points are seeds, the bar is their
        range, the stroke their mean; the dashed line is the reference at its optimum. Where
        bars overlap, the order of two variants may be chance; where there is one point only,
        nothing is known about the spread.""",
    ),
}
