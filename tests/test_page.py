"""Claims about the page of rucksack page, in a headless Chromium: its numbers are PyTorch's."""

import itertools
import json
import lzma
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch
from helpers import SHARED, TOY, VOCABULARY, World, error_of, posix
from torch import Tensor

from rucksack.edits.lines import find_senses, make_edit, parse_lines
from rucksack.loaded import LoadedModel, load_model
from rucksack.model import Backpack, Config
from rucksack.page import page
from rucksack.page.page import WRONG_PREDICTIONS, in_8_bits, write_page
from rucksack.senses import Edit, explain, scale_senses
from rucksack.tokenizer import ENGLISH, GPT2, load_tokenizer, read_tokenizer
from rucksack.words import PROMPT

WITHIN = 1e-4  # tolerance for probabilities


@pytest.fixture(scope='module')
def chromium():
    """Start a headless Chromium. Tests that need it skip where it or playwright is missing."""
    playwright = pytest.importorskip('playwright.sync_api')
    found = [shutil.which(name) for name in ('chromium', 'chromium-browser', 'google-chrome')]
    if not any(found):
        pytest.skip('no Chromium: apt-get install chromium')
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=next(filter(None, found)))
        yield browser
        browser.close()


@contextmanager
def open_tab(chromium, **options):
    """Open a tab whose page must log, throw and fetch nothing."""
    complaints = []
    tab = chromium.new_page(**options)
    tab.set_default_timeout(120_000)
    tab.on('console', lambda message: complaints.append(message.text))
    tab.on('pageerror', lambda error: complaints.append(str(error)))
    tab.on('request', lambda request: complaints.append(request.url))
    yield tab
    tab.close()
    local = ('file:', 'data:', 'blob:', 'about:')
    assert [about for about in complaints if not about.startswith(local)] == []


@pytest.fixture
def tab(chromium):
    """Open an empty tab."""
    with open_tab(chromium) as tab:
        yield tab


@pytest.fixture(scope='module')
def toy_page(tmp_path_factory) -> Path:
    """Write the page of the toy model with the verb page."""
    file = tmp_path_factory.mktemp('page') / 'toy.html'
    page.main([str(file), '--from', str(TOY)])
    return file


@pytest.fixture
def toy_tab(tab, toy_page):
    """Open a tab with the page of the toy model."""
    load(tab, toy_page)
    return tab


@pytest.fixture(scope='module')
def shared_tab(chromium, toy_page):
    """Share one tab between all tests that make no edits in it, because loading takes a while."""
    with open_tab(chromium) as tab:
        load(tab, toy_page)
        yield tab


def load(tab, page: Path, fragment: str = '') -> None:
    """Load a page, with a link's fragment, and wait until its model is ready."""
    tab.goto('about:blank')  # a new fragment alone would not reload the page
    tab.goto(page.resolve().as_uri() + fragment)
    tab.evaluate('ready')
    settle(tab)


def link(text: str, *lines: str, **choices: str) -> str:
    """Make the fragment of a link to a text, edits, and what is chosen on the page."""
    return '#' + urlencode({'text': text, 'edit': '\n'.join(lines)} | choices)


def numbers(tab, selector: str) -> list[float]:
    """Read the unrounded numbers that an element shows."""
    return tab.locator(f'{selector} data').evaluate_all('cells => cells.map(x => Number(x.value))')


def settle(tab) -> None:
    """Wait until the worker has answered all questions, and the page has drawn the answers."""
    tab.wait_for_function('waiting.length === 0')


def predict(tab, prompt: str, lines: list[str]) -> tuple[list[int], list[float]]:
    """Return the ids of the ten next tokens that the page finds likeliest, and how likely."""
    script = 'question => ask("look", question)'
    words = tab.evaluate(script, {'string': prompt, 'lines': lines, 'compare': None})['next']
    return [word['id'] for word in words], [word['now'] for word in words]


def press(tab, name: str) -> None:
    """Press the button of that name."""
    tab.get_by_role('button', name=name, exact=True).click()
    settle(tab)


def assert_shows(tab, probs: Tensor) -> None:
    """Assert that the page shows how likely the ten likeliest tokens of probs (V,) are."""
    settle(tab)
    shown = numbers(tab, '#next td:nth-of-type(3)')
    assert shown == pytest.approx(probs.topk(10).values.tolist(), abs=WITHIN)


def apply(tab, *lines: str) -> None:
    """Type edits into the box for them, and apply them."""
    tab.fill('#lines', '\n'.join(lines))
    press(tab, 'Apply')


def number(text: str) -> float:
    """Read a number that the page shows."""
    return float(text.replace('−', '-'))


PROMPTS = {
    'default': PROMPT, 'a word': 'nurse', 'nothing': '',
    'longer than block_size': 'the nurse said the nurse and the doctor ' * 12}

EDITS = {
    'none': [],
    'numbers': ['nurse:0,3-5=0.25', '*:2=1.5'],
    'off twice': ['nurse,teacher:3,3', 'nurse:3=0.25'],
    'a word twice': ['nurse,nurse:0-3=2'],
    'pair': ['nurse:she/he=0.5'],
    'replacements in order': ['*: she -> he', 'nurse: he -> they'],
    'a replacement and a scaling': ['nurse: she -> he', 'nurse:1=-2']}


def edit_of(lines: list[str], world: World) -> Edit:
    """Make the edit that sample.py makes of the same lines."""
    edit, _ = make_edit(parse_lines(lines), world.model, world.encoding, [world.idx])
    return edit


@pytest.mark.parametrize('prompt', PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize('lines', EDITS.values(), ids=EDITS)
def test_the_page_predicts_what_pytorch_does(lines, prompt, shared_tab):
    """The ten likeliest tokens and their probabilities are PyTorch's, under the same edits."""
    world = World(TOY, prompt)
    probs = world.probs(edit_of(lines, world))
    ids, found = predict(shared_tab, prompt, lines)
    assert found == pytest.approx(probs.topk(10).values.tolist(), abs=WITHIN)
    assert found == pytest.approx(probs[ids].tolist(), abs=WITHIN)


@pytest.mark.parametrize('prompt, where, effect', [
    (PROMPTS['longer than block_size'], 'after this text', True), ('The', 'at weight 1', False)])
def test_the_page_says_which_sense_is_off(prompt, where, effect, tab, toy_page):
    """The page names sample.py's sense, and a word that the text lacks, which has no effect."""
    load(tab, toy_page, link(prompt, 'nurse:she/he'))
    world = World(TOY, prompt)
    (sense,), _ = find_senses('nurse', 'she/he', world.model, world.encoding, [world.idx])
    notes = tab.text_content('#notes')
    assert notes.startswith(f'Sense {sense} of nurse most separates she/he {where}')
    assert ('no effect' not in notes) == effect
    assert (tab.locator('#most span').count() > 0) == effect


@pytest.mark.slow
@pytest.mark.parametrize('wrong', WRONG_PREDICTIONS, ids=lambda wrong: wrong['edit'])
def test_a_wrong_prediction_is_repaired(wrong, tab, tmp_path):
    """A button shows the wrong word, the right one now, and how far they moved, all in 8 bits."""
    world = World('english', wrong['text'])
    for p in world.model.parameters():
        if p.dim() == 2:
            scale, whole = in_8_bits(p.data)
            p.data = scale[:, None] * whole  # as in the page
    before = world.probs()
    now = world.probs(edit_of([wrong['edit']], world))
    write_page(load_model('english', 'cpu'), PROMPT, tmp_path / 'english.html')
    load(tab, tmp_path / 'english.html')
    press(tab, f"{wrong['text']} {wrong['a']} → {wrong['b']}")
    assert 'in 8 bits' in tab.text_content('#model')
    assert tab.locator('#pair bdi').all_text_contents() == [wrong['a'], wrong['b']]
    shown = numbers(tab, '#pair')
    assert [shown[0], shown[3]] == pytest.approx([before.max().item(), now.max().item()], abs=2e-3)
    moved = dict(text.split() for text in tab.locator('#most span').all_text_contents())
    for word in (wrong['a'], wrong['b']):
        points = 100 * (now - before)[world.id(word)].item()
        assert number(moved[word]) == pytest.approx(points, abs=0.3)


@torch.no_grad()
@pytest.mark.parametrize('line', ['nurse:0-15=-1', 'room:0-15=-1'])
def test_the_page_counts_changed_predictions(line, tab, toy_page, world):
    """The page says after how many tokens of the text an edit changes the likeliest next word."""
    load(tab, toy_page, link(PROMPT, line))
    C = world.model.senses(world.idx)
    before = world.model(world.idx, C=C)[0].argmax(-1)  # (T,)
    now = world.model(world.idx, C=edit_of([line], world)(world.idx, C))[0].argmax(-1)
    n_changed = (before != now).sum().item()
    assert tab.text_content('#changed') == f'{n_changed} of the {len(world.ids)} tokens'


@pytest.mark.parametrize('prompt', PROMPTS.values(), ids=PROMPTS)
def test_greedy_text_is_pytorchs(prompt, shared_tab):
    """At temperature 0 the page writes what generate writes, under an edit and past block_size."""
    world = World(TOY, prompt)
    eot = world.encoding.eot_token
    lines = ['nurse:she/he=-9']  # the prompt alone chooses the sense
    written = world.model.generate(world.idx, 100, 0.0, edit=edit_of(lines, world), stop=eot)
    new = [v for v in written[0, len(world.ids):].tolist() if v != eot]
    script = 'settings => [...generate(settings)].at(-1) ?? ""'
    settings = {'string': prompt, 'n': 100, 'seed': 0, 'temperature': 0, 'lines': lines}
    found = shared_tab.workers[0].evaluate(script, settings)
    assert found == world.encoding.decode(new)


@pytest.mark.parametrize('line, offending', [
    ('zebra:0', 'zebra'), ('nurse:16', '16'), ('nurse', 'nurse'), ('nurse:1,5-3', '5-3'),
    ('*:she/he', '*:she/he'), ('nurse:she/she', 'she/she'), ('topic music', 'topic music'),
    ('@x:3', '@x:3'), ('@x.safetensors=0.5', '@x.safetensors=0.5')])
def test_a_line_of_an_edit_that_cannot_be_read_is_named(line, offending, shared_tab):
    """The error names a line with an unknown word, sense or form, or one only for sample.py."""
    with pytest.raises(Exception, match=f'“{re.escape(offending)}”'):
        predict(shared_tab, 'The', [line])


NASTY = [
    '', '   ', '\n\n  x\t\r\n y ', "don't we'll I'M 'S it's", '1234567 3.14 ½ ①', 'שלום עליכם',
    'n\u0303o\u0301', '👩‍⚕️🙂 emoji🙂', '日本語のテキスト', '\u00a0\u2003\u3000x\u0085y\ufeffz',
    'a\u200db\u200cc', '_under_score__', '<|endoftext|> <script>alert(1)</script>', 'x' * 300,
    '\x00\x01\x7f', '…—“quotes”', 'İıẞß', '\U0001d54f\ud7ff']


def small_loaded(tokenizer: dict) -> LoadedModel:
    """Make the smallest untrained model for a tokenizer."""
    n_vocab = load_tokenizer(tokenizer).n_vocab
    model = Backpack(Config(8, n_vocab, n_layer=1, n_head=1, n_embd=2, n_sense=1))
    return LoadedModel('small', model.eval(), tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize('merges', ['toy', 1000, 16384, None])
def test_tokens_are_tiktokens(merges, tab, tmp_path):
    """Real and nasty lines get tiktoken's ids, with the toy's words and with GPT-2's BPE."""
    if merges is None and not VOCABULARY.is_dir():
        pytest.skip("GPT-2's vocabulary is not at hand")
    if merges == 'toy':
        loaded = load_model(str(TOY), 'cpu')
    else:
        tokenizer = GPT2
        if merges:
            tokenizer = GPT2 | {'merges': read_tokenizer(ENGLISH)['merges'][:merges]}
        loaded = small_loaded(tokenizer)
    lines = NASTY.copy()
    articles = SHARED / 'text' / 'simplewiki.jsonl.xz'
    if articles.exists():
        with lzma.open(articles, 'rt', encoding='utf-8') as rows:
            for row in itertools.islice(rows, 200):
                lines += json.loads(row)['text'].split('\n')
    write_page(loaded, '', tmp_path / 'page.html')
    load(tab, tmp_path / 'page.html')
    script = 'lines => lines.map(line => tokenizer.encode(line))'
    found = tab.workers[0].evaluate(script, lines)
    assert found == [loaded.encode(line) for line in lines]


def test_the_numbers_of_tokens_add_up_to_the_log_odds(tab, toy_page, world):
    """The numbers below the tokens sum to the log odds of the two words, under an edit too."""
    load(tab, toy_page, link(PROMPT, 'nurse:0=0.5', a='she', b='they'))
    logp = world.probs(scale_senses([world.id('nurse')], [0], 0.5)).log()
    log_odds = (logp[world.id('she')] - logp[world.id('they')]).item()
    terms = [number(text) for text in tab.locator('#tokens small').all_text_contents()]
    rounding = 0.005 * (len(terms) + 1)
    assert sum(terms) == pytest.approx(log_odds, abs=rounding)
    assert f'{log_odds:+.2f}'.replace('-', '−') in tab.text_content('#legend')


def test_a_card_shows_a_sense(toy_tab, world):
    """A card has the six words that its sense raises most, the six it lowers most, and alpha."""
    toy_tab.locator('#tokens button').nth(2).click()
    settle(toy_tab)
    C = world.model.senses(world.idx[0, 2])  # (k, d)
    logits = (C @ world.E.T)[:, 256:]  # (k, words)
    rows = torch.stack([logits.topk(6).values, logits.topk(6, largest=False).values], -1)
    alpha, _ = explain(world.model, world.idx, world.E[0])  # (1, T, k)
    toy_tab.mouse.move(0, 0)  # the card under the pointer would count
    for card in toy_tab.locator('#cards article').all():
        sense = int(card.get_attribute('data-sense'))
        cells = card.locator('td:nth-child(even)').all_text_contents()
        expected = rows[sense].flatten().tolist()
        assert [number(cell) for cell in cells] == pytest.approx(expected, abs=0.006)
        card.locator('button').first.focus()
        assert toy_tab.text_content('#sense') == f'sense {sense}'
        expected = alpha[0, :, sense].tolist()
        assert numbers(toy_tab, '#alpha') == pytest.approx(expected, abs=WITHIN)


def test_the_page_compares_words_without_spaces(tab, tmp_path):
    """In a script without spaces, tokens are words, and can be looked up as they are shown."""
    loaded = small_loaded({'name': 'gpt2', 'merges': ['ä ¸', 'ä¸ Ń', 'æ ĸ', 'æĸ ĩ']})
    write_page(loaded, '中文', tmp_path / 'page.html')
    load(tab, tmp_path / 'page.html')
    press(tab, 'Compare')
    assert {tab.input_value('#a'), tab.input_value('#b')} == {'中', '文'}
    assert tab.text_content('#said') == ''
    assert 'NaN' not in tab.text_content('#legend')


@pytest.mark.slow
@pytest.mark.parametrize('text, place, line, shown, moved', [
    (PROMPT, 2, 'nurse:3 = 0.5', '0.50', ['nurse:3=2']),
    (PROMPT, 2, 'nurse,guard:2-3=0.5', '0.50', ['nurse,guard:2-3=0.5', 'nurse:3=4']),
    (PROMPT, 2, '*:3=0', '0.00', ['*:3=0', 'nurse:3=2']),
    ('The nurse. The', 0, 'The:3', '0.00', ['The:3=2']),
    ('The nurse. The', 3, 'The:3', '0.00', ['The:3=2'])])
def test_a_slider_shows_all_that_scales_its_sense(text, place, line, shown, moved, tab, toy_page):
    """A slider moved to 2 doubles its sense, if it can, wherever the word occurs in the text."""
    load(tab, toy_page, link(text, line, token=str(place)))
    card = tab.locator('#cards article[data-sense="3"]')
    assert card.locator('output').text_content() == shown
    card.locator('input').press('End')
    world = World(TOY, text)
    assert_shows(tab, world.probs(edit_of(moved, world)))
    assert tab.input_value('#lines').split('\n') == moved


@pytest.mark.slow
def test_the_link_brings_all_back(toy_tab, toy_page):
    """The address holds all choices; a line that cannot be read is named, and changes nothing."""
    world = World(TOY, 'The nurse & the guard #1')
    lines = ['nurse: she -> he', 'nurse:she/he=0.5', 'guard:3']
    toy_tab.fill('#text', 'The nurse & the guard #1')
    apply(toy_tab, 'nurse:3')
    apply(toy_tab, 'nurse:4', 'zebra:1')
    assert 'zebra' in toy_tab.text_content('#said')
    assert toy_tab.input_value('#lines') == 'nurse:4\nzebra:1'
    assert_shows(toy_tab, world.probs(edit_of(['nurse:3'], world)))
    apply(toy_tab, *lines)
    toy_tab.fill('#b', 'they')
    press(toy_tab, 'Compare')
    toy_tab.locator('#tokens button').nth(1).click()
    settle(toy_tab)
    toy_tab.locator('#cards article').nth(2).locator('button').first.click()
    names = '["text", "lines", "b", "word", "sense"]'
    script = f'{names}.map(id => byId(id).value ?? byId(id).textContent)'
    chosen = toy_tab.evaluate(script)
    load(toy_tab, toy_page, toy_tab.evaluate('location.hash'))
    assert toy_tab.evaluate(script) == chosen
    assert_shows(toy_tab, world.probs(edit_of(lines, world)))


N_SCRIPTS = 3  # on the page once it has started


@posix
@pytest.mark.slow
def test_markup_in_a_command_stays_text(out, tab):
    """Markup in --start and in a file's name is text in the page."""
    Path('x<').mkdir()
    name = 'x</script>.pt'
    Path(name).symlink_to(Path('out/toy/ckpt.pt').resolve())
    markup = '<script>document.body.innerHTML = "gone"</script></script><b>"&amp;\' the nurse'
    page.main(['page.html', '--start', markup, '--from', name])
    load(tab, Path('page.html'))
    assert tab.input_value('#text') == markup
    assert name in tab.text_content('#model')
    assert tab.locator('script').count() == N_SCRIPTS


def test_a_model_too_large_is_refused(out, capsys, monkeypatch):
    """The error names a model with more parameters than a page takes, and no page is written."""
    monkeypatch.setattr(page, 'LARGEST', 1000)
    assert 'out/toy' in error_of(page, capsys, 'page.html', '--from', 'out/toy')
    assert [path.name for path in Path().iterdir()] == ['out']


def test_typed_text_survives_a_reload(toy_tab):
    """The address gets a text while it is typed, before its box loses the focus."""
    toy_tab.fill('#text', 'a river')
    toy_tab.wait_for_function('location.hash.includes("river")')
    toy_tab.reload()
    toy_tab.evaluate('ready')
    assert toy_tab.input_value('#text') == 'a river'


@pytest.mark.parametrize('sandbox', [None, 'allow-scripts'])
def test_the_page_runs_in_a_page(sandbox, tab, toy_page):
    """In <iframe srcdoc>, as notebooks embed it, the page has no address, but it predicts."""
    script = """([srcdoc, sandbox]) => {
        const frame = Object.assign(document.createElement('iframe'), {srcdoc});
        if (sandbox) frame.sandbox = sandbox;
        document.body.append(frame);
    }"""
    tab.evaluate(script, [toy_page.read_text(encoding='utf-8'), sandbox])
    frame = tab.frame_locator('iframe')
    frame.locator('body:not([inert])').wait_for()
    frame.locator('#text').fill('The nurse')
    frame.locator('#tokens button').nth(2).wait_for(state='detached')
    assert frame.locator('#tokens bdi').all_text_contents() == ['·The', 'nurse']
    frame.locator('#lines').fill('nurse:3')
    frame.locator('text=Apply').click()
    frame.locator('.edited').wait_for()  # though a sandbox without allow-forms submits none
    frame.locator('summary').click()
    frame.locator('[name=n]').press('Enter')
    frame.locator('#written h2 >> text=now').wait_for()
