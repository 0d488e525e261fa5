"""Claims about the page of sample.py --html, in a real browser where there is one: headless Chromium."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ROOT, VOCABULARY, error_of, say
from test_model import lively
from test_sample import World
from torch.testing import assert_close

import sample
from model import Backpack, Config
from rucksack.grammar import word_id
from rucksack.page import LinearizedPrediction, label, written
from rucksack.table import load
from senses import compose, edited, scale_senses, separation

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason='there is no Chromium: apt-get install chromium')
LOOK = "document.querySelector('#look input').value = '%s'; $('look').requestSubmit();"


def make(capsys, *argv: str) -> Path:
    """The page of a command."""
    say(sample, capsys, '--html', 'page.html', *argv)
    return Path('page.html').resolve()


def browse(page: Path, fragment: str = '', script: str = '', flags: tuple = ('--dump-dom',)) -> str:
    """What Chromium makes of a page and of a script at its end: the document as HTML."""
    scripted = page.with_name('scripted.html')
    scripted.write_text(page.read_text().replace('</body>', f'<script>{script}</script></body>'))
    return subprocess.run(
        [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', f'--user-data-dir={page.parent}/browser',
         '--virtual-time-budget=2000', *flags, scripted.as_uri() + fragment],
        capture_output=True, text=True, timeout=120, check=True).stdout


def title_of(dom: str) -> str:
    """Where scripts leave their results."""
    return html.unescape(re.search('<title>(.*?)</title>', dom, re.DOTALL)[1])


def check_table(world: World, dom: str, *edits: tuple, within: float = 1e-5) -> None:
    """A page has the ten likeliest words after edits, in order, and PyTorch's probabilities of them."""
    row = r'<bdi class="">(.*?)</bdi></th><td>.*?value="(.*?)".*?value="(.*?)">(?:&lt;)?([\d.]+)%'
    rows = re.findall(row, re.search('<tbody>(.*?)</tbody>', dom, re.DOTALL)[1])
    before, now = world.probs(), world.probs(*(scale_senses(*edit) for edit in edits))
    labels = {label(world.encoding, v): v for v in range(len(world.E))}
    ids = [labels[html.unescape(row[0])] for row in rows]
    assert len(ids) == 10 and now[ids].tolist() == pytest.approx(now.topk(10).values.tolist(), abs=within)
    for column, expected, error in ((1, before[ids], 0), (2, now[ids], 0), (3, 100 * now[ids], 0.1)):
        assert [float(row[column]) for row in rows] == pytest.approx(expected.tolist(), abs=within + error)


@torch.no_grad()
@pytest.mark.parametrize('columns', [34, 2, 10, 33])
def test_a_linearized_prediction_is_the_model_under_edits(columns):
    """It is so at any weights; with fewer columns than words at weight 1, and in its derivatives there."""
    model, idx = lively(n_vocab=34), torch.tensor([[3, 7, 3, 11, 20, 7]])  # U = 4 words, two of them twice
    p, every = LinearizedPrediction(model, idx[0].tolist(), columns), columns == 34
    assert p.parts.shape == (4, 3, columns) and len(p.next) == (34 if every else columns - columns // 2)
    def here(w):
        return (p.base + torch.einsum('ul,ulv->v', w - 1, p.parts)).softmax(-1)[:len(p.next)]
    def exact(w):
        edits = [scale_senses([v], [l], w[u, l].item()) for u, v in enumerate(p.ids) for l in range(3)]
        return model(idx, C=edited(model, idx, compose(edits)))[0, -1, :34].softmax(-1)[p.next]
    for w in 2 * torch.rand(6, 4, 3).double() if every else torch.ones(1, 4, 3).double():
        assert_close(here(w), exact(w), rtol=1e-10, atol=0)
    for step in 1e-4 * torch.eye(12).double().view(12, 4, 3):
        assert_close(*(f(1 + step) - f(1 - step) for f in (here, exact)), rtol=1e-4, atol=1e-11)


@in_browser
@pytest.mark.parametrize('prompt, weights', [(sample.PROMPT, {('nurse', 0): 0.0, ('room', 15): 1.5}), *(
    pytest.param(prompt, {}, marks=pytest.mark.slow) for prompt in (
        '<script>document.body.innerHTML = "gone"</script> the nurse', '</script><b>"&amp;\' the </b>',
        'שלום the עליכם nurse', 'nurse 🙂👩‍⚕️ said', 'the\n\n  nurse\tsaid \u202e\x01 x DATA $&', '',
        'The nurse said that she left. ' * 11 + 'nurse'))])
def test_a_link_turns_senses_off_and_text_stays_text(out, capsys, prompt, weights):
    """#WORD:SENSE=WEIGHT gives PyTorch's prediction; prompts and model names are no markup."""
    Path('x<').mkdir()
    Path('x</script>.pt').symlink_to(Path('out/toy/ckpt.pt').resolve())
    world, page = World(prompt=prompt), make(capsys, '--start', prompt, '--from', 'x</script>.pt')
    dom = browse(page, '#' + '&'.join(f'{word}:{l}={w}' for (word, l), w in weights.items()), """
        document.title = JSON.stringify([document.querySelectorAll('script').length,
          [...document.querySelectorAll('#prompt bdi')].slice(0, -1).map(b => b.textContent).join('')]);""")
    check_table(world, dom, *(([world.id(word)], [l], w) for (word, l), w in weights.items()))
    assert json.loads(title_of(dom)) == [3, world.encoding.decode(world.ids)]
    assert '<p>Backpack x&lt;/script&gt;.pt: ' in dom and '<b>' not in dom
    assert ('The prompt has 78 tokens; the model reads the last 64.' in dom) == (len(prompt) > 300)


@in_browser
@pytest.mark.slow
def test_a_slider_moves_the_prediction_and_the_link(out, capsys):
    """Sliders, their link and buttons give PyTorch's edit; what a link asks for in vain is named."""
    prompt = '& = % : # + / é the nurse said the nurse'
    page, world = make(capsys, '--start', prompt), World(prompt=prompt)
    script = """columns.forEach((column, j) => { column.click();
        const range = document.querySelector('[aria-label^="Weight of sense 1 of "]');
        range.value = place[j] / 20;
        range.dispatchEvent(new Event('input')); range.dispatchEvent(new Event('change')); });
      $('copy').click(); document.title = location.hash;"""
    edits, dom = [([w], [1], u / 20) for u, w in enumerate(sorted(set(world.ids)))], browse(page, '', script)
    check_table(world, dom, *edits)
    bad = ['doctor:1=0', 'nurse:16=0', 'nurse:2=2.5', 'nurse:3=-1', '%E0%A4:1=0', 'x', 'nurse:1=1e']
    again = browse(page, '&'.join([title_of(dom), *bad]))
    check_table(world, again, *edits)
    assert f'left out: {" ".join(bad)}<' in again and title_of(dom).count('&') == len(edits) - 1
    off = """document.querySelector('[aria-label="Turn sense 0 of nurse off"]').click();"""
    for script, ids in ((off, [world.id('nurse')]), (off + off, []), ("$('reset').click();", [])):
        check_table(world, browse(page, '#nurse:0=0.37', script), (ids, [0], 0.0))


@in_browser
@pytest.mark.slow
def test_cards_read_the_senses_of_words(out, capsys):
    """They have the words that each sense raises and lowers most, of the prompt's words and of others."""
    world, page = World(), make(capsys)
    for word, compared in (('nurse', 2), ('farmer', 0)):
        script = LOOK % 'zebra' + 'document.title = $("found").textContent;' + LOOK % word.upper()
        dom = browse(page, '', script)
        assert f'aria-live="polite">{word}<' in dom and '“zebra” is not among' in title_of(dom)
        adds = world.model.senses(torch.tensor(world.id(word))) @ world.E.T  # (k, V)
        cards = re.findall(r'<article aria-label="sense (\d+)">(.*?)</article>', dom)
        assert sorted(int(l) for l, _ in cards) == list(range(16))
        for l, card in cards:
            cells = re.findall(r'<td><bdi[^>]*>(.*?)</bdi></td><td>([−+][\d.]+)</td>', card)
            found, its = [float(x.replace('−', '-')) for _, x in cells], adds[int(l)].tolist()
            assert sorted(found[:12]) == pytest.approx(sorted(its)[:6] + sorted(its)[-6:], abs=0.0051)
            by_label = {label(world.encoding, v): x for v, x in enumerate(its)}
            assert found == pytest.approx([by_label[html.unescape(w)] for w, _ in cells], abs=0.0051)
            assert len(found) == 12 + compared and min(found[:12:2]) >= max(found[1:12:2])


@in_browser
@pytest.mark.slow
def test_colours_add_up_to_the_odds(out, capsys):
    """Effects add up to the log odds of a pair; every control has a name; nothing is fetched."""
    page, world = make(capsys), World()
    dom = browse(page, '#nurse:0=0.5', """for (const [id, name] of [['a', 'she'], ['b', 'they']]) {
        $(id).value = [...$(id).options].find(o => o.text === name).value;
        $(id).dispatchEvent(new Event('change')); }
      const all = [...document.querySelectorAll('button, input, select')];
      document.title = [all.filter(e => !(e.ariaLabel || e.labels?.length || e.textContent.trim())).length,
                        all.length > 30, performance.getEntriesByType('resource').length];""")
    effects = re.findall(r'<small>([−+][\d.]+)</small>', dom)
    logp = world.probs(scale_senses([world.id('nurse')], [0], 0.5)).log()
    gap = (logp[world.id('she')] - logp[world.id('they')]).item()
    assert len(effects) == 8 and f'other, {gap:+.2f}. Choose'.replace('-', '−') in dom
    assert sum(float(x.replace('−', '-')) for x in effects) == pytest.approx(gap, abs=8 * 0.0051)
    assert title_of(dom) == '0,true,0'
    assert not re.findall(r'(?:src|href)=|https?://|@import|url\(', page.read_text())


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize('name, size, light', [
    ('page', (1280, 760), 1), ('phone', (500, 900), 1), ('dark', (1280, 760), 0)])
def test_pictures_of_the_page(out, capsys, request, name, size, light):
    """It is drawn wide and on a phone, light and dark: into SCREENSHOTS, where set, of the trained toy."""
    folder = request.getfixturevalue('trained_toy' if 'SCREENSHOTS' in os.environ else 'toy') / 'out' / 'toy'
    file, s = ROOT / os.environ.get('SCREENSHOTS', out) / f'{name}.png', load(str(folder), 'cpu')
    nurse, she, he = (word_id(s.encoding, word) for word in ('nurse', 'she', 'he'))
    best, second = separation(s.model, nurse, she, he).abs().topk(2).indices.tolist()
    browse(make(capsys, '--from', str(folder)), f'#nurse:{best}=0&nurse:{second}=0.4', flags=(
        f'--screenshot={file}', '--hide-scrollbars', '--window-size={},{}'.format(*size),
        f'--blink-settings=preferredColorScheme={light}'))
    data = file.read_bytes()
    assert data[:4] == b'\x89PNG' and len(data) > 30_000
    assert tuple(int.from_bytes(data[i:i + 4]) for i in (16, 20)) == size


@in_browser
@pytest.mark.slow
@pytest.mark.skipif(not VOCABULARY.is_dir(), reason="GPT-2's vocabulary is not at hand")
@pytest.mark.parametrize('prompt, groups', [('one', False), ('one two three', True), (' '.join(
    f'{a} {b}' for a in 'red green blue white black'.split() for b in range(30)), True)])
def test_a_page_of_a_large_vocabulary_is_small(prompt, groups, out, capsys):
    """It is below 5 MB, says how many ids are in groups, and is PyTorch's at weight 1."""
    torch.manual_seed(0)
    model = Backpack(Config(64, 50304, 50257, n_layer=1, n_head=2, n_embd=32, n_sense=8))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    torch.save({'model': model.state_dict(), 'model_config': vars(model.config), 'settings': {},
                'tokenizer': {'name': 'gpt2'}}, 'large.pt')
    told = say(sample, capsys, '--html=page.html', '--start', prompt, '--from=large.pt', '--show=dragon')
    sizes = re.search(r'to ([\d,]+) words(?: and to the other ([\d,]+) in \d+ groups)?; ', told).groups('0')
    assert sum(int(size.replace(',', '')) for size in sizes) == 50257 and (sizes[1] != '0') == groups
    world, page = World('large.pt', prompt), Path('page.html').resolve()
    assert page.stat().st_size < 5_000_000 and ('approximate' in told) == groups
    check_table(world, browse(page))
    key, last = written(world.encoding, world.ids[-1]), world.ids[-1:]
    dom = browse(page, f'#{key}:1=0&{key}:2=2', LOOK % 'dragon')
    check_table(world, dom, (last, [1], 0.0), (last, [2], 2.0), within=0.01 if groups else 1e-5)
    assert 'aria-live="polite">dragon<' in dom


def test_a_page_is_replaced_whole_or_not_at_all(out, capsys, monkeypatch):
    """If the disk is full the one that was there stays; who has a page open reads on in the old one."""
    first = make(capsys, '--start', 'nurse').read_bytes()
    with open('page.html', 'rb') as old:
        before = make(capsys).read_bytes()
        assert old.read() == first != before

    def full(path, text, encoding):
        path.write_bytes(text[:100].encode())
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(Path, 'write_text', full)
    assert 'No space left' in error_of(sample, capsys, '--html', 'page.html', '--start', 'nurse')
    assert Path('page.html').read_bytes() == before
    assert sorted(path.name for path in Path().iterdir()) == ['out', 'page.html']
