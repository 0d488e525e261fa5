"""Claims about the page of sample.py --html, loaded in a real browser: headless Chromium."""

import html
import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from urllib.parse import quote

import conftest
import pytest
import tiktoken
import torch
from conftest import ROOT, VOCABULARY

import sample
from model import Backpack, Config
from rucksack import grammar as grammar_py
from rucksack import page as page_py
from rucksack.data import load_tokenizer
from rucksack.grammar import word_id
from rucksack.published import from_pretrained
from senses import compose, extremes, scale_senses

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason='there is no Chromium: apt-get install chromium')

say = partial(conftest.say, sample)
error_of = partial(conftest.error_of, sample, printed=2)


@pytest.fixture
def out(toy, tmp_path, monkeypatch):
    """The working directory has out/toy."""
    monkeypatch.chdir(tmp_path)
    Path('out').symlink_to(toy / 'out')
    return tmp_path


class World:
    """A model, its words, and the prompt of a page."""

    def __init__(self, source: str = 'out/toy', prompt: str = grammar_py.PROMPT):
        self.model = from_pretrained(source)
        self.encoding = load_tokenizer(self.model.tokenizer)
        self.ids = self.encoding.encode_ordinary(prompt)[-self.model.config.block_size:]
        self.labels = {page_py.label(self.encoding, v): v for v in range(self.model.config.n_vocab)}

    def id(self, word: str) -> int:
        """The token of a word inside a text."""
        return word_id(self.encoding, word)

    @torch.no_grad()
    def probs(self, *edits) -> torch.Tensor:
        """What PyTorch says of the next word after edits (words, senses, factor): (V,)."""
        edit = compose([scale_senses(*e) for e in edits]) if edits else None
        logits = self.model(torch.tensor([self.ids]), edit=edit)[0][0, -1, :self.model.config.n_vocab]
        return logits.double().softmax(-1)


def browse(page: Path, fragment: str = '', script: str = '', flags: tuple = ()) -> str:
    """What Chromium makes of a page and of a script at its end: the document as HTML."""
    if script:
        text, page = page.read_text(), page.with_name('scripted.html')
        page.write_text(text.replace('</body>', f'<script>{script}</script></body>'))
    done = subprocess.run(
        [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', f'--user-data-dir={page.parent}/browser',
         '--virtual-time-budget=2000', *(flags or ['--dump-dom']), page.as_uri() + fragment],
        capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_of(dom: str) -> dict[str, tuple[float, float]]:
    """Word -> probability before and now, from the table of next words."""
    body = re.search('<tbody>(.*?)</tbody>', dom, re.DOTALL)[1]
    rows = re.findall(r'<bdi class="">(.*?)</bdi></th><td>.*?value="(.*?)".*?value="(.*?)"', body)
    return {html.unescape(word): (float(before), float(now)) for word, before, now in rows}


def check_table(world: World, dom: str, edits: list[tuple], within: float) -> None:
    """The table has the ten likeliest words after the edits, likeliest first, and PyTorch's probabilities."""
    rows, before, now = rows_of(dom), world.probs(), world.probs(*edits)
    ids = [world.labels[word] for word in rows]
    assert len(ids) == 10
    assert now[ids].tolist() == pytest.approx(now.topk(10).values.tolist(), abs=within)
    assert [row[0] for row in rows.values()] == pytest.approx(before[ids].tolist(), abs=within)
    assert [row[1] for row in rows.values()] == pytest.approx(now[ids].tolist(), abs=within)
    shown = [float(x) for x in re.findall(r'value="[^"]*">(?:&lt;)?([\d.]+)%<', dom)][1:20:2]
    assert shown == pytest.approx((100 * now[ids]).tolist(), abs=100 * within + 0.1)


MOVE = """
const range = [...document.querySelectorAll('input[type=range]')]
  .find(r => r.ariaLabel === 'Weight of sense %d of %s');
range.value = %s;
range.dispatchEvent(new Event('input'));
range.dispatchEvent(new Event('change'));
"""


LOOK = "document.querySelector('#look input').value = '%s'; $('look').requestSubmit();"


@needs_browser
@pytest.mark.parametrize('weights', [
    {}, {('nurse', 0): 0.0}, {('nurse', 0): 2.0, ('nurse', 1): 0.25, ('room', 15): 1.5},
    {(',', 15): 0.125, ('the', 3): 0.0}])
def test_a_link_turns_senses_off(out, capsys, weights):
    """The fragment #WORD:SENSE=WEIGHT gives the ten probabilities of PyTorch under the same edit."""
    say(capsys, '--html', 'page.html')
    world = World()
    fragment = '&'.join(f'{quote(word)}:{l}={w}' for (word, l), w in weights.items())
    dom = browse(Path('page.html').resolve(), f'#{fragment}')
    edits = [([world.encoding.encode_ordinary(',')[0] if word == ',' else world.id(word)], [l], w)
             for (word, l), w in weights.items()]
    check_table(world, dom, edits, within=2e-5)


@needs_browser
def test_a_slider_moves_the_prediction_and_the_link(out, capsys):
    """Sliders moved by hand give PyTorch's edit; the link that is copied then gives it again, and reset
    takes it back."""
    prompt = 'The nurse said that the nurse said that'
    say(capsys, '--html', 'page.html', '--start', prompt)
    page, world = Path('page.html').resolve(), World(prompt=prompt)
    choose = """[...document.querySelectorAll('#prompt button')].find(
      b => b.firstChild.textContent === ' %s').click();"""
    script = choose % 'nurse' + '{' + MOVE % (0, 'nurse', 0.37) + '}' + choose % 'said'
    script += '{' + MOVE % (5, 'said', 1.91) + '}'
    edits = [([world.id('nurse')], [0], 0.37), ([world.id('said')], [5], 1.91)]
    assert (world.probs(*edits) - world.probs()).abs().max() > 0.05
    copy = "$('copy').click(); document.title = location.hash;"
    dom = browse(page, '', script + copy)
    check_table(world, dom, edits, within=2e-5)
    fragment = re.search('<title>(.*?)</title>', dom)[1]
    assert html.unescape(fragment) == '#nurse:0=0.37&said:5=1.91'
    check_table(world, browse(page, html.unescape(fragment)), edits, within=2e-5)
    check_table(world, browse(page, html.unescape(fragment), "$('reset').click();"), [], within=2e-5)
    off = "document.querySelector('[aria-label=\\'Turn sense 0 of nurse off\\']').click();"
    check_table(world, browse(page, '', choose % 'nurse' + off), [([world.id('nurse')], [0], 0.0)], 2e-5)
    check_table(world, browse(page, '', choose % 'nurse' + off + off), [], within=2e-5)


@needs_browser
def test_any_word_survives_a_link(out, capsys):
    """Words that mean something in an address, and bytes of a character, come back from the link that their
    sliders make."""
    prompt = '& = % : # + / é nurse'
    say(capsys, '--html', 'page.html', '--start', prompt)
    page, world = Path('page.html').resolve(), World(prompt=prompt)
    words = list(dict.fromkeys(world.ids))
    script = """columns.forEach((column, j) => { column.click();
        document.querySelectorAll('input[type=range]').forEach(range => {
          if (range.ariaLabel.startsWith('Weight of sense 1 of ')) {
            range.value = place[j] / 20; range.dispatchEvent(new Event('input')); range.dispatchEvent(
            new Event('change')); } }); });
      document.title = location.hash;"""
    edits = [([w], [1], sorted(words).index(w) / 20) for w in words]
    dom = browse(page, '', script)
    check_table(world, dom, edits, within=2e-5)
    fragment = html.unescape(re.search('<title>(.*?)</title>', dom)[1])
    assert fragment.count('&') == len(words) - 1
    check_table(world, browse(page, fragment), edits, within=2e-5)


@needs_browser
def test_what_a_link_asks_for_that_is_not_there_is_left_out(out, capsys):
    """Of a link with a word, a sense and a weight that cannot be and one that can, the last is done and the
    others are named."""
    say(capsys, '--html', 'page.html')
    bad = ['doctor:1=0', 'nurse:16=0', 'nurse:2=2.5', 'nurse:3=-1', '%E0%A4:1=0', 'x', 'nurse:1=1e']
    dom = browse(Path('page.html').resolve(), '#' + '&'.join([*bad, 'nurse:4=0']))
    check_table(World(), dom, [([World().id('nurse')], [4], 0.0)], within=2e-5)
    status = re.search('id="said">(.*?)</p>', dom)[1]
    assert all(part in html.unescape(status) for part in bad) and 'nurse:4' not in status


@needs_browser
@pytest.mark.parametrize('prompt', [
    '<script>document.body.innerHTML = "gone"</script> the nurse', '</script><b>"&amp;\' the </b>',
    'שלום the עליכם nurse', 'nurse 🙂👩‍⚕️ said', 'the\n\n  nurse\tsaid \u202e\x01 x DATA $&'])
def test_a_prompt_stays_text(out, capsys, prompt):
    """Markup, quotes, emoji and right-to-left text appear on the page character for character, and as such
    alone."""
    say(capsys, '--html', 'page.html', '--start', prompt)
    script = """document.title = JSON.stringify([
      [...document.querySelectorAll('#prompt bdi')].slice(0, -1).map(b => b.textContent).join(''),
      document.querySelectorAll('script').length, document.querySelectorAll('#prompt b').length,
      $('prompt').ariaLabel]);"""
    dom = browse(Path('page.html').resolve(), '', script)
    told = re.search('<title>(.*?)</title>', dom, re.DOTALL)[1]
    shown, scripts, markup, whole = json.loads(html.unescape(told))
    assert shown == prompt and prompt in whole and scripts == 3 and markup == 0
    check_table(World(prompt=prompt), dom, [], within=2e-5)


@needs_browser
def test_the_name_of_a_model_stays_text(out, capsys):
    """A checkpoint in a file that is called like the end of a script ends none."""
    Path('x<').mkdir()
    Path('x</script>.pt').symlink_to(Path('out/toy/ckpt.pt').resolve())
    say(capsys, '--html', 'page.html', '--from', 'x</script>.pt')
    dom = browse(Path('page.html').resolve())
    check_table(World(), dom, [], within=2e-5)
    assert '<p>x&lt;/script&gt;.pt: Backpack' in dom


@needs_browser
def test_cards_read_the_senses_of_words(out, capsys):
    """The card of a sense has the words it raises and lowers most with the model's scores, for a word of the
    prompt (then also of the two words compared) and for one that is looked up, in whatever case; a word that
    is not there is named, until another is found."""
    say(capsys, '--html', 'page.html')
    world, page = World(), Path('page.html').resolve()
    for word in ('nurse', 'farmer'):
        dom = browse(page, '', LOOK % word.upper())
        assert f'aria-live="polite">{word}<' in dom
        C = world.model.senses(torch.tensor(world.id(word)))  # (k, d)
        scores = extremes(world.model, C, 6)[1]  # (k, 12)
        cards = re.findall(r'<article aria-label="sense (\d+)">(.*?)</article>', dom)
        assert sorted(int(l) for l, _ in cards) == list(range(16))
        for l, card in cards:
            cells = re.findall(r'<td><bdi[^>]*>(.*?)</bdi></td><td>([−+][\d.]+)</td>', card)
            cells, pair = cells[:12:2] + cells[1:12:2], cells[12:]  # raised and lowered; the two compared
            found = [float(x.replace('−', '-')) for _, x in cells]
            assert found == pytest.approx(scores[int(l)].tolist(), abs=0.0051)
            its = world.model.project(C[int(l)])[[world.labels[html.unescape(w)] for w, _ in cells]]
            assert found == pytest.approx(its.tolist(), abs=0.0051)  # words of one score have no order
            assert [name for name, _ in pair] == (['she', 'he'] if word == 'nurse' else [])
            for name, x in pair:
                its = world.model.project(C[int(l)])[world.id(name)].item()
                assert float(x.replace('−', '-')) == pytest.approx(its, abs=0.0051)
    assert '“zebra” is not among' in browse(page, '', LOOK % 'zebra')
    dom = browse(page, '', LOOK % 'zebra' + LOOK % '+When')
    assert '“zebra”' not in dom and 'id="word"' in dom and 'aria-live="polite">When<' in dom


@needs_browser
def test_colours_and_cards_add_up_to_the_odds(out, capsys):
    """The effects of all words on one word above another add up to the difference of their logits, for the
    pair that is chosen."""
    say(capsys, '--html', 'page.html')
    world = World()
    script = """const pick = (id, name) => { const select = $(id);
        select.value = [...select.options].find(o => o.text === name).value;
        select.dispatchEvent(new Event('change')); };
      pick('a', 'she'); pick('b', 'they');"""
    dom = browse(Path('page.html').resolve(), '#nurse:0=0.5', script)
    told = re.findall(r'<small>([−+][\d.]+)</small>', dom)
    probs = world.probs(([world.id('nurse')], [0], 0.5))
    gap = (probs[world.id('she')] / probs[world.id('they')]).log().item()
    assert len(told) == 8
    assert sum(float(x.replace('−', '-')) for x in told) == pytest.approx(gap, abs=8 * 0.0051)
    assert f'other, {gap:+.2f}. Choose'.replace('-', '−') in dom


@needs_browser
def test_everything_on_the_page_has_a_name_for_a_screen_reader(out, capsys):
    """Buttons, sliders, choices and fields are native elements with a name, and nothing is fetched."""
    say(capsys, '--html', 'page.html')
    script = """document.title = [...document.querySelectorAll('button, input, select')].filter(e =>
      !(e.ariaLabel || e.labels?.length || e.textContent.trim())).length + ' of ' +
      document.querySelectorAll('button, input, select').length + ', ' +
      performance.getEntriesByType('resource').length;"""
    dom = browse(Path('page.html').resolve(), '', script)
    assert re.search('<title>0 of ([3-9][0-9]), 0</title>', dom)
    assert not re.findall(r'(?:src|href)=|https?://|@import|url\(', Path('page.html').read_text())


@needs_browser
def test_a_page_of_one_word(out, capsys):
    """A prompt of one word, and an empty one, which is the end-of-text, make a page too."""
    for prompt in ('nurse', ''):
        say(capsys, '--html', 'page.html', '--start', prompt)
        world = World(prompt=prompt)
        world.ids = world.ids or [world.encoding.eot_token]
        check_table(world, browse(Path('page.html').resolve()), [], within=2e-5)


@needs_browser
def test_a_long_prompt_is_cropped_and_says_so(out, capsys):
    """The page of a prompt longer than the block is of its end, and says so, as the terminal does."""
    prompt = ('The nurse said that she left. ' * 12).strip()
    line = 'The prompt has 84 tokens; the model reads the last 64.'
    assert line in say(capsys, '--html', 'page.html', '--start', prompt)
    dom = browse(Path('page.html').resolve())
    assert line in dom
    check_table(World(prompt=prompt), dom, [], within=2e-5)


@needs_browser
def test_pictures_of_the_page(out, capsys, tmp_path):
    """The page is drawn on a wide screen and on a phone, light and dark; SCREENSHOTS in the environment is a
    folder to keep the pictures in."""
    say(capsys, '--html', 'page.html')
    folder = ROOT / os.environ.get('SCREENSHOTS', tmp_path)
    for name, size, flags in (('page', (1280, 760), ()), ('phone', (500, 900), ()),
                              ('dark', (1280, 760), ('--blink-settings=preferredColorScheme=0',))):
        picture = folder / f'{name}.png'
        browse(Path('page.html').resolve(), '#nurse:0=0&nurse:1=0.4', flags=(
            f'--screenshot={picture}', f'--window-size={size[0]},{size[1]}', '--hide-scrollbars', *flags))
        data = picture.read_bytes()
        assert data[:4] == b'\x89PNG' and len(data) > 30_000
        assert tuple(int.from_bytes(data[i:i + 4]) for i in (16, 20)) == size


# -----------------------------------------------------------------------------
# Without a browser.


def large_model(tmp_path) -> Path:
    """Weights for GPT-2's vocabulary, made so that a few hundred words take most of the probability."""
    torch.manual_seed(0)
    model = Backpack(Config(block_size=64, vocab_size=50304, n_vocab=50257, n_layer=1, n_head=2, n_embd=32,
                            n_sense=8))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.4)
    model.tokenizer = {'name': 'gpt2'}
    torch.save({'model': model.state_dict(), 'model_config': vars(model.config), 'settings': {},
                'tokenizer': model.tokenizer}, tmp_path / 'large.pt')
    return tmp_path / 'large.pt'


@pytest.fixture
def large(out):
    """A checkpoint with GPT-2's vocabulary."""
    try:
        tiktoken.get_encoding('gpt2')
    except Exception:
        pytest.skip('the vocabulary of GPT-2 cannot be had')
    return large_model(out)


@pytest.mark.parametrize('prompt', ['one', 'one two three', ' '.join(
    f'{a} {b}' for a in 'red green blue white black'.split() for b in range(30))])
def test_a_page_of_a_large_vocabulary_is_small(large, capsys, prompt):
    """With 50,257 words a page stays below 5 MB and says how many words it has one by one, in how many
    groups the others are, and its error; where the browser is there it is as PyTorch's up to this."""
    told = say(capsys, '--html', 'page.html', '--start', prompt, '--from', str(large), '--show', 'dragon')
    page = Path('page.html').resolve()
    assert page.stat().st_size < 5_000_000
    n, others, error = re.search(r'adds to ([\d,]+) words(?: and to the other (\S+) in \d+ groups)?; '
                                 r'.*probability is ([\d.e-]+)', told).groups()
    assert int(n.replace(',', '')) + int((others or '0').replace(',', '')) == 50257
    assert (others is None) == (prompt == 'one') and 0 < float(error) < 0.01
    if CHROMIUM:
        world = World(str(large), prompt)
        last = world.ids[-1:]
        key = page_py.written(world.encoding, last[0])
        dom = browse(page, f'#{key}:1=0&{key}:2=2')
        check_table(world, dom, [(last, [1], 0.0), (last, [2], 2.0)], within=float(error) + 1e-5)
        assert 'aria-live="polite">dragon<' in browse(page, '', LOOK % 'dragon')


@pytest.mark.parametrize('argv, message', [
    (['--html', 'none/page.html'], 'no folder to write it to'), (['--html', '.'], 'is no file'),
    (['--html', ''], 'is no file'),
    (['--html', 'out/toy/ckpt.pt'], 'does not end in .html'),
    (['--html', 'x.html', '--senses-off', 'nurse:1'], 'as it is'),
    (['--html', 'x.html', '--explain'], 'leave out'), (['--html', 'x.html', '--export', 'y'], 'leave out'),
    (['--html', 'gpt.pt/x.html'], 'no folder'), (['--html', str(page_py.TEMPLATE)], 'template'),
    (['--html', 'x.html', '--show', 'zebra'], "'zebra'"),
    (['--html', 'x.html', '--start', 'FILE:none'], 'none'),
    (['--html', 'x.html', '--from', 'gpt.pt'], 'only a Backpack has senses')])
def test_a_page_that_cannot_be_made_is_one_line(argv, message, out, capsys):
    """Exit code 2, one line, and no file."""
    checkpoint = torch.load('out/toy/ckpt.pt', weights_only=True)
    checkpoint['model'] = {k: v for k, v in checkpoint['model'].items() if not k.startswith('sense_')}
    checkpoint['model_config']['n_sense'] = 0
    torch.save(checkpoint, 'gpt.pt')
    assert message in error_of(capsys, *argv)
    assert not list(Path().glob('*.html*')) and not list(Path().glob('.*partial*'))


def test_a_page_is_replaced_whole_or_not_at_all(out, capsys, monkeypatch):
    """When the disk fills up while a page is written, the one that was there stays; and who has it open when
    another takes its place reads on in the old one."""
    say(capsys, '--html', 'page.html', '--start', 'nurse')
    with open('page.html', 'rb') as old:
        first = Path('page.html').read_bytes()
        say(capsys, '--html', 'page.html')
        assert old.read() == first
    before = Path('page.html').read_bytes()
    assert before != first

    def full(path, text, encoding):
        with open(path, 'w') as file:
            file.write(text[:100])
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(Path, 'write_text', full)
    assert 'No space left' in error_of(capsys, '--html', 'page.html', '--start', 'nurse')
    assert Path('page.html').read_bytes() == before
    assert sorted(p.name for p in Path().iterdir()) == ['out', 'page.html']


def test_labels_tell_tokens_apart(toy):
    """No two tokens of a vocabulary have one label, and none is empty or has what cannot be seen."""
    kinds = [load_tokenizer(from_pretrained(toy / 'out' / 'toy').tokenizer)]
    if VOCABULARY.is_dir():
        kinds.append(tiktoken.get_encoding('gpt2'))
    for encoding in kinds:
        labels = [page_py.label(encoding, v) for v in range(encoding.n_vocab)]
        assert all(label and label.isprintable() and ' ' not in label for label in labels)
        assert len(set(labels)) > 0.99 * len(labels)
    assert page_py.TEMPLATE.read_text().count('DATA') == 1
