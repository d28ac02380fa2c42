"""For any text, the page has the data of its JSON and shows no text as markup."""

import html.parser
import json
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest

from moddepth_jax.analysis import routing_page
from moddepth_jax.analysis.depth_mass import DepthMass
from moddepth_jax.analysis.inspection import Inspection
from moddepth_jax.analysis.routing_page import page_data, render, shown_tokens
from moddepth_jax.hparams import from_config
from moddepth_jax.model.routing import RoutingRecord
from tests.model.cases import LOOPED, RECURSIONS, TOKEN_CHOICE

HOSTILE = b'</script><script>alert(1)</script><!--"\'&amp;__DATA__'
HOSTILE += b'\x00\x1b[31m\xff\xed\xa0\x80\xe2\x80\xae'
NAMES = {
    'run': '<b>run',
    'step': 3,
    'num_steps': 4,
    'text': '</script>.py',
    'language': 'prose',
    'cut': 0,
    'depth_tokens': 0,
}


class Page(html.parser.HTMLParser):
    """Elements by name, ids, and the text inside each script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.scripts, self.links = [], set(), [], []
        self.names = set()  # of `about`, that the page shows or depends on
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        attributes = dict(attributes)
        self.ids.add(attributes.get('id'))
        names = (attributes.get('data-show'), attributes.get('data-if'))
        self.names |= {name.partition('=')[0] for name in names if name}
        self.links += [attributes[name] for name in ('src', 'href') if name in attributes]
        if tag == 'script':
            self.scripts.append('')

    def handle_data(self, text):
        if self.scripts and self.get_starttag_text().startswith('<script'):
            self.scripts[-1] += text


def make_data(tiny_config, content=HOSTILE, routing='predictor', depth=None, changes=None, **names):
    """Page data of a text of byte tokens, with three layers of which 1 and 2 are routed."""
    model = {
        'model.num_layers': 3,
        'model.routing.router': 'learned',
        'model.routing.layers': '1,2',
        'data.sequence_length': 8,
    }
    hparams = from_config(tiny_config(**model | (changes or {})))
    size, rng = len(content) + 1, np.random.default_rng(0)
    num_routed = len(hparams.model.routed_layers)
    scores_RN = rng.normal(size=(num_routed, size)).astype(np.float32)
    inspection = Inspection(
        routers=hparams.model.router_of_block,
        tokens_N=np.arange(size),
        pieces=(b'', *[content[i : i + 1] for i in range(len(content))]),
        routing=RoutingRecord(
            scores_BT=scores_RN,
            rule_logits_BT=scores_RN - np.float32(0.5),
            top_c_BT=scores_RN > 0,
            selected_BT=scores_RN > 0,
            dropped_BT=scores_RN > 9,
            gates_BT=scores_RN,
        ),
        change_LN=rng.random((hparams.model.num_blocks, size)).astype(np.float32),
        entropy_N=rng.random(size).astype(np.float32),
        loss_N=np.append(rng.random(size - 1), np.nan).astype(np.float32),
    )
    return page_data(inspection, hparams, np.zeros(size, int), routing, NAMES | names, depth)


def test_hostile_text_stays_data(tiny_config):
    """For any text and names there are two scripts, and the first is exactly the data."""
    data = make_data(tiny_config)
    text = render(data)
    page, plain = Page(text), Page(render(make_data(tiny_config, b'x', text='x', run='x')))
    assert page.tags == plain.tags and page.ids == plain.ids
    assert len(page.scripts) == 2 and text.count('</script>') == 2
    assert json.loads(page.scripts[0]) == data
    assert 'alert' not in page.scripts[1] and '__SCRIPT__' not in text
    assert page.scripts[1] == plain.scripts[1] and '</style>' in text


def test_no_network_and_no_markup_of_data(tiny_config):
    """The page names no address, forbids itself to load any, and assigns text as text."""
    text = render(make_data(tiny_config, b'x'))
    assert Page(text).links == ['data:,']
    assert not re.search(r'https?://|@import|url\(', text)
    assert "default-src 'none'" in text
    for dangerous in ('innerHTML', 'outerHTML', 'insertAdjacentHTML', 'document.write', 'eval('):
        assert dangerous not in text


def test_page_and_script_fit_together(tiny_config):
    page = Page(render(make_data(tiny_config, b'x')))
    asked = set(re.findall(r"(?:get|getElementById)\('(\w+)'\)", page.scripts[1]))
    assert len(asked) > 7 and asked <= page.ids
    about = make_data(tiny_config, b'x')['about']
    assert len(page.names) > 15 and page.names <= set(about)


@pytest.mark.parametrize(
    ('pieces', 'shown'),
    [
        ([b'', b'a', b'\n', b'\t', b' '], ['§', 'a', '↵\n', '→\t', ' ']),
        (['é'.encode()[:1], 'é'.encode()[1:], b'x'], ['é', '▫', 'x']),
        (['漢字'.encode()[:4], '漢字'.encode()[4:]], ['漢字', '▫']),
        ([b'\xff', b'\x00', b'\x1b', b'\x7f', '\u202e'.encode()], ['□', '␀', '␛', '␡', '□']),
        ([b'a', 'e\u0301'.encode()], ['a', 'e◌\u0301']),
        ([b'\xed\xa0\x80', '\u2028'.encode(), b'\xc3'], ['□□□', '□', '□']),
        ([b'<b>'], ['<b>']),
    ],
)
def test_shown_tokens(pieces, shown):
    assert shown_tokens(pieces) == shown


def test_numbers_of_the_json(tiny_config):
    data = make_data(tiny_config, b'abc', routing='threshold')
    tokens, layers = data['tokens'], data['layers']
    assert {len(side) for side in tokens.values()} == {4} and tokens['loss'][-1] is None
    assert tokens['bytes'] == ['', '61', '62', '63']
    assert [layer['routed'] for layer in layers] == [False, True, True]
    assert set(layers[0]) == {'layer', 'routed', 'relative', 'name'}
    assert tokens['passed'] == [
        a + b for a, b in zip(*(x['entered'] for x in layers[1:]), strict=True)
    ]
    for layer in layers[1:]:
        assert layer['entered'] == [int(score > 0) for score in layer['score']]
        assert layer['threshold'] == 0.5
        assert all(value == float(f'{value:.4g}') for value in layer['score'])
    json.dumps(data, allow_nan=False)


def test_blocks_of_a_routed_loop_share_its_router(tiny_config):
    """Blocks are named after their loop; a token counts once per loop, for any number of blocks."""
    loops = {'model.looped_layers': 'middle:1:0', 'model.loops': 3, 'model.routing.layers': 'loops'}
    data = make_data(tiny_config, b'abc', changes=loops)
    layers, about = data['layers'], data['about']
    names = [
        '0',
        *(f'{2 * loop + block - 2} (loop {loop})' for loop in (1, 2, 3) for block in (1, 2)),
    ]
    assert [layer['name'] for layer in layers] == names
    assert [layer.get('router') for layer in layers] == [None, 0, 0, 1, 1, 2, 2]
    counts = [sum(x) for x in zip(*(layers[i]['entered'] for i in (1, 3, 5)), strict=True)]
    assert data['tokens']['passed'] == counts
    assert (about['loops'], about['blocks'], about['capacity']) == (3, False, '100% to 12.5%')


@pytest.mark.parametrize(
    ('changes', 'capacity'),
    [
        (RECURSIONS | {'model.num_layers': 3}, '100% to 25%'),
        (TOKEN_CHOICE | {'model.num_layers': 3}, '100%'),
        ({'model.routing.capacity_form': 'log_length', 'model.routing.capacity': 0.5}, '75%'),
    ],
)
def test_the_page_states_the_share_of_the_tokens_that_training_selects(
    changes, capacity, tiny_config
):
    """Regression: it was the knob `capacity` for every form and router."""
    assert make_data(tiny_config, b'abc', changes=changes)['about']['capacity'] == capacity


def test_the_page_says_that_tokens_do_not_exit_the_loops(tiny_config):
    """The threshold of the run is text, since the page rounds numbers; '' leaves out the note."""
    loops = LOOPED | {'model.routing.router': 'none', 'model.routing.layers': ''}
    for threshold, shown in ((0.0005, '0.0005'), (0.0, '')):
        changes = loops | {'model.loop_exit_threshold': threshold}
        data = make_data(tiny_config, b'abc', routing='dense', changes=changes)
        assert data['about']['exit_threshold'] == shown
    assert 'exit_threshold' in Page(render(data)).names


def test_shares_of_layers_without_tokens_are_null(tiny_config):
    nan = np.nan
    sides = np.array([[nan], [0.5]]), np.array([nan, 0.5]), np.array([nan, 0.25])
    depth = make_data(tiny_config, b'a', depth=DepthMass(('0', '1'), ('0b',), *sides))['depth']
    assert depth['slots_LS'] == [[None], [0.5]]
    assert (depth['depth_L'], depth['first_token_L']) == ([None, 0.5], [None, 0.25])


@pytest.mark.skipif(
    shutil.which('node') is None, reason='node, which parses the script, is missing'
)
def test_script_is_valid(tmp_path):
    script = pathlib.Path(routing_page.__file__).with_suffix('.js')
    subprocess.run(['node', '--check', script], check=True)


# What a reader does in a window of some width, and what does not hold there.
SCRIPT = """
<script>
{
const wrong = [], side = document.getElementById('side'), text = document.getElementById('text');
const tokens = [...text.querySelectorAll('[data-i]')], last = tokens.length - 1;
const current = () => Number(text.querySelector('.current').dataset.i);
function check(what, i) {
  const [box, token] = [side, text.querySelector('.current')].map((x) => x.getBoundingClientRect());
  if (current() !== i) wrong.push(`${what}: token ${current()} is shown and not ${i}`);
  const inside = box.height > 50 && box.top > -1 && box.bottom < innerHeight + 1;
  if (!inside) wrong.push(`${what}: the box is not in the window`);
  const apart = token.bottom <= box.top || token.right <= box.left;
  if (!apart) wrong.push(`${what}: the box covers token ${i}`);
}
function act(kind, i) {
  tokens[i].scrollIntoView({ block: 'center' });
  tokens[i].dispatchEvent(new MouseEvent(kind, { bubbles: true }));
}
const press = (key) => text.dispatchEvent(new KeyboardEvent('keydown', { key }));
if (document.documentElement.scrollWidth > innerWidth) wrong.push('it scrolls sideways');
const middle = last >> 1;
for (const i of [1, middle, last]) { act('mouseover', i); check('pointed at', i); }
act('click', middle);
act('mouseover', middle + 9);
tokens[middle].scrollIntoView({ block: 'center' });
check('kept by a click', middle);
for (let n = 0; n < 40; n++) press('ArrowDown');
check('moved by keys', middle + 400);
press('Escape');
act('mouseover', 5);
check('let go by Escape', 5);
act('click', 7); act('click', 7); act('mouseover', 9);
check('let go by a second click', 9);
parent.postMessage(wrong.join('; ') || 'all holds', '*');
}
</script>
"""
WINDOW = """
<pre>no answer</pre><script>
onmessage = (event) => { document.querySelector('pre').textContent = event.data; };
</script><iframe src="page.html" width="WIDTH" height="900" style="border: 0"></iframe>
"""


@pytest.mark.skipif(shutil.which('chromium') is None, reason='chromium is missing')
@pytest.mark.parametrize('width', [390, pytest.param(1000, marks=pytest.mark.slow), 1400])
def test_details_are_shown_next_to_the_pointed_token(width, tiny_config, tmp_path):
    """By pointer, click and keys at any position. Regression: out of sight below 1100 px."""
    page = render(make_data(tiny_config, b'to be, or not to be\n' * 200))
    (tmp_path / 'page.html').write_text(page.replace('</body>', f'{SCRIPT}</body>'))
    (tmp_path / 'window.html').write_text(WINDOW.replace('WIDTH', str(width)))
    browser = ['chromium', '--headless', '--no-sandbox', '--disable-gpu', '--window-size=1600,1000']
    browser += [f'--user-data-dir={tmp_path}/profile', '--virtual-time-budget=20000', '--dump-dom']
    line = [*browser, f'file://{tmp_path}/window.html']
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    (found,) = re.findall('<pre>(.*)</pre>', done.stdout)
    assert found == 'all holds'
