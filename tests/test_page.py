"""Claims about the page of sample.py --html, in a real browser where there is one: headless Chromium."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from conftest import ROOT, VOCABULARY, error_of, say
from test_model import lively
from test_sample import World, as_transformer

import sample
from model import Backpack, Config
from rucksack.data import load_tokenizer
from rucksack.page import TEMPLATE, LinearizedPrediction, label, written
from senses import compose, edited, extremes, scale_senses

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason='there is no Chromium: apt-get install chromium')


def make(capsys, *argv: str) -> Path:
    """The page of a command."""
    say(sample, capsys, '--html', 'page.html', *argv)
    return Path('page.html').resolve()


def browse(page: Path, fragment: str = '', script: str = '', flags: tuple = ('--dump-dom',)) -> str:
    """What Chromium makes of a page and of a script at its end: the document as HTML."""
    scripted = page.with_name('scripted.html')
    scripted.write_text(page.read_text().replace('</body>', f'<script>{script}</script></body>'))
    done = subprocess.run(
        [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', f'--user-data-dir={page.parent}/browser',
         '--virtual-time-budget=2000', *flags, scripted.as_uri() + fragment],
        capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_table(world: World, dom: str, *edits: tuple, within: float = 1e-5) -> None:
    """The table of a page has the ten likeliest words after edits (ids, senses, factor), likeliest first, and
    PyTorch's probabilities before them and now."""
    body = re.search('<tbody>(.*?)</tbody>', dom, re.DOTALL)[1]
    rows = re.findall(r'<bdi class="">(.*?)</bdi></th><td>.*?value="(.*?)".*?value="(.*?)">(?:&lt;)?([\d.]+)%', body)
    before, now = world.probs(), world.probs(*(scale_senses(*edit) for edit in edits))
    labels = {label(world.encoding, v): v for v in range(world.encoding.n_vocab)}
    ids = [labels[html.unescape(row[0])] for row in rows]
    assert len(ids) == 10 and now[ids].tolist() == pytest.approx(now.topk(10).values.tolist(), abs=within)
    for column, probs in ((1, before), (2, now)):
        assert [float(row[column]) for row in rows] == pytest.approx(probs[ids].tolist(), abs=within)
    assert [float(row[3]) for row in rows] == pytest.approx((100 * now[ids]).tolist(), abs=100 * within + 0.1)


def title_of(dom: str) -> str:
    """Where scripts leave their results."""
    return html.unescape(re.search('<title>(.*?)</title>', dom, re.DOTALL)[1])


# -----------------------------------------------------------------------------
# What the page computes.


@torch.no_grad()
@pytest.mark.parametrize('columns', [34, 2, 10, 33])
def test_a_linearized_prediction_is_the_model_under_edits(columns):
    """For any weights its probabilities are the model's under scale_senses for each word and sense; with
    fewer columns than words they are at weight 1, and so are their derivatives."""
    model, ids = lively(n_vocab=34), [3, 7, 3, 11, 20, 7]  # two words stand twice
    p, idx = LinearizedPrediction(model, ids, columns), torch.tensor([ids])
    n, ones = len(p.next), torch.ones(1, 4, 3, dtype=torch.float64)
    assert p.parts.shape == (4, 3, columns) and n == (34 if columns == 34 else columns - columns // 2)

    def here(weights):
        return (p.base + torch.einsum('nul,ulv->nv', weights - 1, p.parts)).softmax(-1)[:, :n]

    def exact(weights):
        C = [edited(model, idx, compose([scale_senses([v], [l], w[u, l].item()) for l in range(3)
                                         for u, v in enumerate(p.ids.tolist())])) for w in weights]
        return torch.cat([model(idx, C=c)[:, -1, :34].softmax(-1)[:, p.next] for c in C])
    some = p.random_weights(6, seed=5) if columns == 34 else ones
    torch.testing.assert_close(here(some), exact(some), rtol=1e-10, atol=0)
    steps = 1 + 1e-4 * torch.eye(12, dtype=torch.float64).reshape(-1, 4, 3)
    slopes = (f(steps) - f(2 - steps) for f in (here, exact))
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-11)


@needs_browser
@pytest.mark.parametrize('weights', [
    {('nurse', 0): 0.0, ('nurse', 1): 0.25, ('room', 15): 1.5},
    *(pytest.param(w, marks=pytest.mark.slow) for w in ({}, {(',', 15): 0.125, ('the', 3): 0.0}))])
def test_a_link_turns_senses_off(out, capsys, weights):
    """The fragment #WORD:SENSE=WEIGHT gives the ten probabilities of PyTorch under the same edit."""
    fragment = '&'.join(f'{quote(word)}:{l}={w}' for (word, l), w in weights.items())
    dom, world = browse(make(capsys), f'#{fragment}'), World()
    check_table(world, dom, *(([world.encoding.encode_ordinary(',' if word == ',' else f' {word}')[0]], [l], w)
                              for (word, l), w in weights.items()))


MOVE = """[...document.querySelectorAll('#prompt button')].find(b => b.firstChild.textContent === ' %s').click();
  { const range = document.querySelector('[aria-label="Weight of sense %d of %s"]'); range.value = %s;
    range.dispatchEvent(new Event('input')); range.dispatchEvent(new Event('change')); }"""


@needs_browser
@pytest.mark.slow
def test_a_slider_moves_the_prediction_and_the_link(out, capsys):
    """Sliders moved by hand give PyTorch's edit; the link that is copied then gives it again, and reset
    takes it back; a button turns a sense off and on."""
    prompt = 'The nurse said that the nurse said that'
    page, world = make(capsys, '--start', prompt), World(prompt=prompt)
    edits = [([world.id('nurse')], [0], 0.37), ([world.id('said')], [5], 1.91)]
    script = MOVE % ('nurse', 0, 'nurse', 0.37) + MOVE % ('said', 5, 'said', 1.91)
    dom = browse(page, '', script + "$('copy').click(); document.title = location.hash;")
    check_table(world, dom, *edits)
    assert title_of(dom) == '#nurse:0=0.37&said:5=1.91'
    check_table(world, browse(page, title_of(dom)), *edits)
    check_table(world, browse(page, title_of(dom), "$('reset').click();"))
    off = """document.querySelector('[aria-label="Turn sense 0 of nurse off"]').click();"""
    check_table(world, browse(page, '#nurse:0=0.37', off), ([world.id('nurse')], [0], 0.0))
    check_table(world, browse(page, '#nurse:0=0.37', off + off))


@needs_browser
@pytest.mark.slow
def test_any_word_survives_a_link(out, capsys):
    """Words that mean something in an address, and bytes of a character, come back from the link that their
    sliders make; what a link asks for that is not there is left out and named."""
    prompt = '& = % : # + / é nurse'
    page, world = make(capsys, '--start', prompt), World(prompt=prompt)
    script = """columns.forEach((column, j) => { column.click();
        const range = document.querySelector('[aria-label^="Weight of sense 1 of "]'); range.value = place[j] / 20;
        range.dispatchEvent(new Event('input')); range.dispatchEvent(new Event('change')); });
      document.title = location.hash;"""
    words, dom = sorted(set(world.ids)), browse(page, '', script)
    edits = [([w], [1], u / 20) for u, w in enumerate(words)]
    check_table(world, dom, *edits)
    assert title_of(dom).count('&') == len(words) - 1
    check_table(world, browse(page, title_of(dom)), *edits)
    bad = ['doctor:1=0', 'nurse:16=0', 'nurse:2=2.5', 'nurse:3=-1', '%E0%A4:1=0', 'x', 'nurse:1=1e']
    dom = browse(page, '#' + '&'.join([*bad, 'nurse:4=0']))
    check_table(world, dom, ([world.id('nurse')], [4], 0.0))
    said = html.unescape(re.search('id="said">(.*?)</p>', dom)[1])
    assert all(part in said for part in bad) and 'nurse:4' not in said


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize('prompt', [
    '<script>document.body.innerHTML = "gone"</script> the nurse', '</script><b>"&amp;\' the </b>', 'nurse',
    'שלום the עליכם nurse', 'nurse 🙂👩‍⚕️ said', 'the\n\n  nurse\tsaid \u202e\x01 x DATA $&'])
def test_a_prompt_and_the_name_of_a_model_stay_text(out, capsys, prompt):
    """Markup, quotes, emoji and right-to-left text appear on the page character for character, and as such
    alone; a checkpoint in a file that is called like the end of a script ends none."""
    Path('x<').mkdir()
    Path('x</script>.pt').symlink_to(Path('out/toy/ckpt.pt').resolve())
    dom = browse(make(capsys, '--start', prompt, '--from', 'x</script>.pt'), '', """document.title = JSON.stringify([
      [...document.querySelectorAll('#prompt bdi')].slice(0, -1).map(b => b.textContent).join(''),
      document.querySelectorAll('script').length, document.querySelectorAll('#prompt b').length, $('prompt').ariaLabel]);""")
    shown, scripts, markup, whole = json.loads(title_of(dom))
    assert shown == prompt and prompt in whole and scripts == 3 and markup == 0
    assert '<p>Backpack x&lt;/script&gt;.pt: ' in dom
    check_table(World(prompt=prompt), dom)


LOOK = "document.querySelector('#look input').value = '%s'; $('look').requestSubmit();"


@needs_browser
@pytest.mark.slow
@torch.no_grad()
def test_cards_read_the_senses_of_words(out, capsys):
    """The card of a sense has the words it raises and lowers most with the model's scores, for a word of the
    prompt (then also of the two words compared) and for one that is looked up, in whatever case; a word that
    is not there is named, until another is found."""
    world, page = World(), make(capsys)
    labels = {label(world.encoding, v): v for v in range(world.encoding.n_vocab)}
    for word, compared in (('nurse', 2), ('farmer', 0)):
        dom = browse(page, '', LOOK % word.upper())
        C = world.C(word)  # (k, d)
        scores, all_of_them = extremes(world.model, C, 6)[1], world.model.project(C)  # (k, 12), (k, V)
        cards = re.findall(r'<article aria-label="sense (\d+)">(.*?)</article>', dom)
        assert f'aria-live="polite">{word}<' in dom and sorted(int(l) for l, _ in cards) == list(range(16))
        for l, card in cards:
            cells = re.findall(r'<td><bdi[^>]*>(.*?)</bdi></td><td>([−+][\d.]+)</td>', card)
            found = [float(x.replace('−', '-')) for _, x in cells]
            assert len(found) == 12 + compared
            assert found[:12:2] + found[1:12:2] == pytest.approx(scores[int(l)].tolist(), abs=0.0051)
            its = all_of_them[int(l), [labels[html.unescape(w)] for w, _ in cells]]
            assert found == pytest.approx(its.tolist(), abs=0.0051)  # words of one score have no order
    dom = browse(page, '', LOOK % 'zebra' + 'document.title = $("found").textContent;' + LOOK % '+When')
    assert '“zebra” is not among' in title_of(dom) and '“zebra”' not in dom.split('</title>')[1]
    assert 'aria-live="polite">When<' in dom


@needs_browser
@pytest.mark.slow
def test_colours_and_cards_add_up_to_the_odds(out, capsys):
    """The effects of all words on one word above another add up to the difference of their logits, for the
    pair that is chosen; everything has a name for a screen reader, and nothing is fetched."""
    page, world = make(capsys), World()
    dom = browse(page, '#nurse:0=0.5', """const pick = (id, name) => { const select = $(id);
        select.value = [...select.options].find(o => o.text === name).value;
        select.dispatchEvent(new Event('change')); };
      pick('a', 'she'); pick('b', 'they');
      const all = [...document.querySelectorAll('button, input, select')];
      document.title = [all.filter(e => !(e.ariaLabel || e.labels?.length || e.textContent.trim())).length,
                        all.length > 30, performance.getEntriesByType('resource').length];""")
    effects = re.findall(r'<small>([−+][\d.]+)</small>', dom)
    she, they = world.probs(scale_senses([world.id('nurse')], [0], 0.5)).log()[[world.id('she'), world.id('they')]]
    assert len(effects) == 8 and f'other, {she - they:+.2f}. Choose'.replace('-', '−') in dom
    assert sum(float(x.replace('−', '-')) for x in effects) == pytest.approx((she - they).item(), abs=8 * 0.0051)
    assert title_of(dom) == '0,true,0'
    assert not re.findall(r'(?:src|href)=|https?://|@import|url\(', page.read_text())


@needs_browser
@pytest.mark.slow
def test_a_long_prompt_is_cropped_and_an_empty_one_is_a_page_too(out, capsys):
    """The page of a prompt longer than the block is of its end, and says so, as the terminal does."""
    prompt, line = 'The nurse said that she left. ' * 12, 'The prompt has 84 tokens; the model reads the last 64.'
    assert line in say(sample, capsys, '--html', 'page.html', '--start', prompt.strip())
    dom = browse(Path('page.html').resolve())
    check_table(World(prompt=prompt.strip()), dom)
    assert line in dom
    check_table(World(prompt=''), browse(make(capsys, '--start', '')))


@needs_browser
@pytest.mark.slow
def test_pictures_of_the_page(out, capsys, tmp_path):
    """The page is drawn on a wide screen and on a phone, light and dark; SCREENSHOTS in the environment is a
    folder to keep the pictures in."""
    page, folder = make(capsys), ROOT / os.environ.get('SCREENSHOTS', tmp_path)
    for name, size, flags in (('page', (1280, 760), ()), ('phone', (500, 900), ()),
                              ('dark', (1280, 760), ('--blink-settings=preferredColorScheme=0',))):
        picture = folder / f'{name}.png'
        browse(page, '#nurse:0=0&nurse:1=0.4', flags=(f'--screenshot={picture}', '--hide-scrollbars',
                                                      f'--window-size={size[0]},{size[1]}', *flags))
        data = picture.read_bytes()
        assert data[:4] == b'\x89PNG' and len(data) > 30_000
        assert tuple(int.from_bytes(data[i:i + 4]) for i in (16, 20)) == size


# -----------------------------------------------------------------------------
# The file.


@pytest.mark.slow
@pytest.mark.skipif(not VOCABULARY.is_dir(), reason="GPT-2's vocabulary is not at hand")
@pytest.mark.parametrize('prompt, groups', [('one', False), ('one two three', True), (' '.join(
    f'{a} {b}' for a in 'red green blue white black'.split() for b in range(30)), True)])
def test_a_page_of_a_large_vocabulary_is_small(prompt, groups, out, capsys):
    """With 50,257 ids a page stays below 5 MB and says how many have a column each, and in how many groups
    the others are; at weight 1 it is PyTorch's, and without groups anywhere."""
    torch.manual_seed(0)
    model = Backpack(Config(64, 50304, 50257, n_layer=1, n_head=2, n_embd=32, n_sense=8))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    torch.save({'model': model.state_dict(), 'model_config': vars(model.config), 'settings': {},
                'tokenizer': {'name': 'gpt2'}}, 'large.pt')
    told = say(sample, capsys, '--html', 'page.html', '--start', prompt, '--from', 'large.pt', '--show', 'dragon')
    n, others = re.search(r'adds to ([\d,]+) words(?: and to the other (\S+) in \d+ groups)?; ', told).groups()
    assert int(n.replace(',', '')) + int((others or '0').replace(',', '')) == 50257 and bool(others) == groups
    assert Path('page.html').stat().st_size < 5_000_000 and ('approximate' in told) == groups
    if CHROMIUM:
        world, page = World('large.pt', prompt), Path('page.html').resolve()
        check_table(world, browse(page))
        key, edits = written(world.encoding, world.ids[-1]), [(world.ids[-1:], [1], 0.0), (world.ids[-1:], [2], 2.0)]
        dom = browse(page, f'#{key}:1=0&{key}:2=2', LOOK % 'dragon')
        check_table(world, dom, *edits, within=0.01 if groups else 1e-5)
        assert 'aria-live="polite">dragon<' in dom


@pytest.mark.parametrize('argv, message', [
    (['--html', 'none/page.html'], 'ends in .html, in a folder that exists'), (['--html', '.'], 'ends in .html'),
    (['--html', 'out/toy/ckpt.pt'], 'ends in .html'), (['--html', 'x.html', '--export', 'y'], 'no edits'),
    (['--html', 'x.html', '--senses-off', 'nurse:1'], '--html goes with nothing but --show'),
    (['--html', 'x.html', '--explain'], '--html goes with'), (['--html', 'x.html', '--show', 'zebra'], "'zebra'"),
    (['--html', 'x.html', '--start', 'FILE:none'], 'none'), (['--html', 'x.html', '--from', 'gpt.pt'], 'no senses')])
def test_a_page_that_cannot_be_made_is_one_line(argv, message, out, capsys):
    """Exit code 2, one line, and no file."""
    as_transformer('gpt.pt')
    assert message in error_of(sample, capsys, *argv, printed=2)
    assert not list(Path().glob('*.html*')) and not list(Path().glob('.*partial*'))


def test_a_page_is_replaced_whole_or_not_at_all(out, capsys, monkeypatch):
    """When the disk fills up while a page is written, the one that was there stays; and who has it open when
    another takes its place reads on in the old one."""
    first = make(capsys, '--start', 'nurse').read_bytes()
    with open('page.html', 'rb') as old:
        before = make(capsys).read_bytes()
        assert old.read() == first != before

    def full(path, text, encoding):
        with open(path, 'w') as file:
            file.write(text[:100])
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(Path, 'write_text', full)
    assert 'No space left' in error_of(sample, capsys, '--html', 'page.html', '--start', 'nurse')
    assert Path('page.html').read_bytes() == before
    assert sorted(p.name for p in Path().iterdir()) == ['out', 'page.html']


@pytest.mark.parametrize('name', ['toy', 'gpt2'])
def test_labels_tell_tokens_apart(name, out):
    """Hardly two tokens of a vocabulary have one label, and none is empty or has what cannot be seen."""
    if name == 'gpt2' and not VOCABULARY.is_dir():
        pytest.skip("GPT-2's vocabulary is not at hand")
    encoding = World().encoding if name == 'toy' else load_tokenizer({'name': 'gpt2'})
    labels = [label(encoding, v) for v in range(encoding.n_vocab)]
    assert all(text and text.isprintable() and ' ' not in text for text in labels)
    assert len(set(labels)) > 0.99 * len(labels) and TEMPLATE.read_text().count('DATA') == 1
