"""Claims about the page of sample.py --html, in a real browser where there is one: headless Chromium."""

import itertools
import json
import lzma
import os
import random
from pathlib import Path

import pytest
import torch
from browser import Browser, in_browser
from conftest import ROOT, SHARED, VOCABULARY, error_of, say
from subjects import save, toy_subject
from test_sample import World

import sample
from model import Backpack, Config
from rucksack.data import encode, gpt2_tokenizer, load_tokenizer
from rucksack.grammar import word_forms
from rucksack.page import in_8_bits, rounded, write_page
from rucksack.published import ENGLISH
from rucksack.table import Subject, load
from senses import replace_word, scale_senses, separation

NASTY = [
    '', ' ', '   ', '\n\n  x\t\r\n y ', "don't we'll I'M 'S it's", '1234567 3.14 ½ ①', 'שלום עליכם', 'café',
    'n\u0303o\u0301', '👩‍⚕️🙂 emoji🙂', '日本語のテキスト', '\u00a0\u2003\u3000x\u0085y\ufeffz',
    'a\u200db\u200cc', '_under_score__', '<|endoftext|> <script>alert(1)</script>', 'x' * 300,
    '\x00\x01\x7f', '…—“quotes”', 'İıẞß', '\U0001d54f\ud7ff']
SIZES = {'wide': (1280, 800), 'huge': (1920, 1080), 'phone': (390, 844), 'landscape': (844, 390),
         'narrow': (320, 640)}
SLIDE = 'document.querySelector("#cards article[data-sense=\'%d\'] input").focus()'


def page_of(capsys, *argv: str) -> Path:
    """The page of a command."""
    say(sample, capsys, '--html', 'page.html', *argv)
    return Path('page.html').resolve()


@pytest.fixture
def browser(tmp_path):
    """A browser, that has nothing to complain of at the end of the test."""
    with Browser(tmp_path) as b:
        yield b
        assert b.complaints() == []


def call(browser: Browser, function: str, *args) -> object:
    """What a function of the page gives for values as in JSON."""
    return browser.run(f'{function}({", ".join(map(json.dumps, args))})')


def near(found: list, probs: torch.Tensor, world: World, within: float = 1e-4) -> None:
    """The page has PyTorch's ten likeliest words, and their probabilities."""
    values, ids = probs.topk(len(found))
    assert [p for _, p in found] == pytest.approx(values.tolist(), abs=within)
    by_word = {world.encoding.decode([v]): probs[v].item() for v in range(len(probs))}
    assert all(by_word[word] == pytest.approx(p, abs=within) for word, p in found)


@in_browser
def test_the_page_predicts_what_pytorch_does(out, capsys, browser):
    """Prompts, edits of words, of places and of all words, replacements, and text at temperature 0."""
    browser.open(page_of(capsys))
    for prompt in (sample.PROMPT, 'nurse', '', 'the nurse said the nurse and the doctor ' * 12):
        world = World(prompt=prompt)
        nurse = word_forms(world.encoding, 'nurse')
        near(call(browser, 'rucksack.predict', prompt), world.probs(), world)
        near(call(browser, 'rucksack.predict', prompt, {'nurse:0,3-5': 0.25, '*:2': 1.5}), world.probs(
            scale_senses(nurse, [0, 3, 4, 5], 0.25), scale_senses(None, [2], 1.5)), world)
        l = separation(world.model, nurse[0], world.id('she'), world.id('he')).abs().argmax().item()
        near(call(browser, 'rucksack.predict', prompt, {'nurse:she/he': 0.5}), world.probs(
            scale_senses(nurse, [l], 0.5)), world)
        edits = {'scale': {'nurse:1': 0}, 'replace': [['nurse', 'she', 'he']]}
        near(call(browser, 'ask', 'predict', {'string': prompt, 'edits': edits}), world.probs(
            scale_senses(nurse, [1], 0.0),
            replace_word(world.model, nurse, world.id('she'), world.id('he'))), world)
        edit = scale_senses(nurse, [0], 0.0)
        text = call(browser, 'rucksack.generate', prompt, 100, {'temperature': 0, 'edits': {'nurse:0': 0}})
        ids = world.model.generate(world.idx, 100, 0.0, edit=edit, stop=world.encoding.eot_token)[0].tolist()
        assert text == world.encoding.decode([i for i in ids if i != world.encoding.eot_token])
    one, again, two = (call(browser, 'rucksack.generate', 'The', 30, {'seed': seed}) for seed in (1, 1, 2))
    assert one == again != two
    for key in ('zebra:0', 'nurse:16', 'nurse', 'nurse:x', ''):
        asked = f'rucksack.predict("The", {{{json.dumps(key)}: 0}}).catch(e => e.message)'
        assert browser.run(asked).startswith('“')


@in_browser
def test_what_is_drawn_adds_up(out, capsys, browser):
    """The numbers below the tokens add up to the log odds; cards have the words that senses raise most."""
    browser.open(page_of(capsys), '#compare=she/they&edits={"scale":{"nurse:0":0.5}}')
    world = World()
    logp = world.probs(scale_senses([world.id('nurse')], [0], 0.5)).log()
    gap = (logp[world.id('she')] - logp[world.id('they')]).item()
    tokens = browser.run('[...document.querySelectorAll("#tokens small")].map(e => '
                         '+e.textContent.replace("−", "-"))')
    assert sum(tokens) == pytest.approx(gap, abs=0.005 * (len(tokens) + 1))
    assert f'{gap:+.2f}, the log odds'.replace('-', '−') in browser.run('$("legend").textContent')
    for word, id in (('nurse', world.id('nurse')), ('farmer', world.id('farmer'))):
        C = world.model.senses(torch.tensor(id)) @ world.E.T  # (k, V)
        for l, (high, low) in enumerate(call(browser, 'ask', 'cards', {'word': word})):
            shown = C[l, 256:]  # ids that are words
            for largest, words in ((True, high), (False, low)):
                best = shown.topk(6, largest=largest).values.tolist()
                assert [x for _, x in words] == pytest.approx(best, abs=1e-4)


@in_browser
@pytest.mark.slow
def test_every_control_does_what_it_says(out, capsys, browser):
    """Keys, pointer, scope, compare, replace, look up, write, reset; the link brings all of it back."""
    page = page_of(capsys)
    browser.open(page)
    world, settle = World(), 'new Promise(r => setTimeout(r, 300))'
    nurse = word_forms(world.encoding, 'nurse')

    def check(*edits) -> None:
        browser.run(settle)
        p = world.probs(*edits)
        cells = browser.run('[...document.querySelectorAll("#next tbody tr")].map(r => '
                            '[r.cells[0].textContent, +r.cells[3].firstChild.value])')
        assert [x for _, x in cells] == pytest.approx(p[256:].topk(10).values.tolist(), abs=1e-4)

    check()
    assert browser.run('$("word").textContent') == 'nurse'
    l = browser.run('+document.querySelector("#cards article").dataset.sense')
    browser.run(SLIDE % l)
    for key, shift, weight in (('0', 0, 0.0), ('1', 0, 1.0), ('ArrowRight', 0, 1.05), ('ArrowLeft', 8, 0.8)):
        browser.press(key, shift)
        check(scale_senses(nurse, [l], weight))
    browser.run('$("reset").click()')
    check()
    x, y = browser.run('(b => [b.x + b.width / 2, b.y + b.height / 2])'
                       '(document.querySelector("#cards .slider button").getBoundingClientRect())')
    browser.click(x, y)
    check(scale_senses(nurse, [l], 0.0))
    assert 'would add' in browser.run('document.querySelector(".adds").textContent')
    browser.run('$("scope").value = "all"; $("scope").dispatchEvent(new Event("change"))')
    browser.run(SLIDE % l)
    browser.press('0')
    check(scale_senses(None, [l], 0.0))
    browser.run('$("scope").value = "place"; $("scope").dispatchEvent(new Event("change"));'
                'state.edits.scale = {}')
    browser.run(SLIDE % l)
    browser.press('0')
    check(scale_senses([world.id('nurse')], [l], 0.0))
    for name, value in (('word', 'nurse'), ('old', 'she'), ('now', 'he')):
        browser.run(f'document.querySelector("#replace form").elements.{name}.value = "{value}"')
    browser.run('document.querySelector("#replace form").requestSubmit()')
    both = (scale_senses([world.id('nurse')], [l], 0.0),
            replace_word(world.model, nurse, world.id('she'), world.id('he')))
    check(*both)
    browser.run('$("a").value = "they"; $("compare").requestSubmit()')
    browser.run(settle)
    link = browser.run('location.hash')
    browser.run('$("write").open = true; document.querySelector("#write form").requestSubmit()')
    browser.run('new Promise(r => setTimeout(r, 2000))')
    before, after = browser.run('[...document.querySelectorAll("#written p")].map(p => p.textContent)')
    assert before.startswith(sample.PROMPT) and after.startswith(sample.PROMPT) and len(before) > 40
    browser.run('document.querySelector("#look input").value = "farmer"; $("look").requestSubmit()')
    browser.run(settle)
    assert browser.run('$("word").textContent') == 'farmer'
    browser.run('document.querySelector("#look input").value = "zebra"; $("look").requestSubmit()')
    browser.run(settle)
    assert 'no single word' in browser.run('$("said").textContent')
    browser.open(page, link)
    check(*both)
    assert browser.run('$("pair").textContent').startswith('they ')
    browser.open(page, '#edits={"scale":{"zebra:0":0}}&compare=a/zebra&text=the nurse')
    assert 'zebra' in browser.run('$("said").textContent') and browser.run('$("text").value') == 'the nurse'


@in_browser
@pytest.mark.slow
def test_text_stays_text_whatever_it_is(out, capsys, browser):
    """Markup, 10,000 words, nothing, blanks, other scripts: typed or as --start, they do no harm."""
    Path('x<').mkdir()
    Path('x</script>.pt').symlink_to(Path('out/toy/ckpt.pt').resolve())
    markup = '<script>document.body.innerHTML = "gone"</script></script><b>"&amp;\' the nurse'
    page = page_of(capsys, '--start', markup, '--from', 'x</script>.pt')
    browser.open(page)
    assert browser.run('$("text").value') == World(prompt=markup).encoding.decode(World(prompt=markup).ids)
    for text in [*NASTY, 'nurse said ' * 5000]:
        browser.run(f'$("text").value = {json.dumps(text)}; $("text").dispatchEvent(new Event("input"))')
        browser.run('new Promise(r => setTimeout(r, 150))')
        assert browser.run('document.querySelectorAll("script").length') == 3, text
        assert browser.run('document.querySelectorAll("#next tbody tr").length') == 10
    n = len(World().encoding.encode(text)) - 64
    assert f'its first {n:,} tokens are left out' in browser.run('$("legend").textContent')
    assert '</script>' in browser.run('$("model").textContent')


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize('merges', ['toy', 1000, 16384, None])
def test_tokens_are_tiktokens(merges, out, capsys, browser):
    """1,000 lines of real text and nasty ones, in the toy's vocabulary, GPT-2's and GPT-2's cut."""
    if merges != 'toy' and not VOCABULARY.is_dir():
        pytest.skip("GPT-2's vocabulary is not at hand")
    if merges == 'toy':
        s, lines = load('out/toy', 'cpu'), NASTY
    else:
        encoding = load_tokenizer(tokenizer := gpt2_tokenizer(merges))
        model = Backpack(Config(8, encoding.n_vocab, n_layer=1, n_head=1, n_embd=2, n_sense=1)).eval()
        model.tokenizer, lines = tokenizer, NASTY
        s = Subject('x', model, encoding)
    if (file := SHARED / 'text' / 'simplewiki.jsonl.xz').exists():
        with lzma.open(file, 'rt', encoding='utf-8') as rows:
            texts = [json.loads(next(rows))['text'] for _ in range(2000)]
        text = [line for text in texts for line in text.split('\n')]
        lines = NASTY + random.Random(0).sample(text, 1000)
    write_page(s, '', Path('page.html'))
    browser.open(Path('page.html'))
    found = browser.run(f'Promise.all({json.dumps(lines)}.map(string => ask("encode", {{string}})))')
    assert found == [encode(s.encoding, line) for line in lines]


@in_browser
def test_eight_bits_and_a_transformer(out, capsys, browser):
    """A larger model is that of PyTorch with rounded weights, and says so; a Transformer has no senses."""
    subject = toy_subject(k=4, n_embd=144, n_layer=12, block_size=32)
    assert subject.model.n_params()['total'] > 2e6
    scale, whole = in_8_bits(subject.model.wte.weight.detach())
    assert (scale[:, None] * whole - subject.model.wte.weight).abs().amax(1).le(0.501 * scale).all()
    assert 'in 8 bits: ' in write_page(subject, 'the nurse', Path('page.html'))
    assert Path('page.html').stat().st_size < 1.4 * subject.model.n_params()['total'] + 1e5
    browser.open(Path('page.html'))
    idx = torch.tensor([subject.encode('the nurse said')])
    wanted = rounded(subject.model)(idx)[0, -1].softmax(-1)
    found = call(browser, 'rucksack.predict', 'the nurse said')
    assert [p for _, p in found] == pytest.approx(wanted.topk(10).values.tolist(), abs=1e-4)
    gpt = toy_subject(k=0)
    write_page(gpt, 'the nurse', Path('page.html'))
    browser.open(Path('page.html'))
    wanted = gpt.model(idx)[0, -1].softmax(-1)
    assert [p for _, p in call(browser, 'rucksack.predict', 'the nurse said')] == pytest.approx(
        wanted.topk(10).values.tolist(), abs=1e-4)
    assert 'has no senses' in browser.run('$("legend").textContent')


@in_browser
@pytest.mark.slow
def test_nothing_overlaps_at_any_size(out, capsys, tmp_path, request):
    """Nothing is wider than the window, controls have names; pictures go to SCREENSHOTS, if that is set."""
    name = 'english' if ENGLISH.is_dir() else str(request.getfixturevalue('toy') / 'out/toy')
    page = page_of(capsys, '--from', name)
    for dark in (False, True):
        with Browser(tmp_path, dark=dark) as b:
            b.open(page)
            for size, (width, height) in SIZES.items():
                b.resize(width, height)
                b.run('new Promise(r => setTimeout(r, 200))')
                assert b.run('document.scrollingElement.scrollWidth') <= width, size
                boxes = b.run('''[...document.querySelectorAll("main button, main input, main h3, #text")]
                    .filter(e => e.checkVisibility()).map(e => [e.outerHTML,
                    ...["left", "top", "right", "bottom"].map(x => e.getBoundingClientRect()[x])])''')
                for (one, *p), (other, *q) in itertools.combinations(boxes, 2):
                    assert p[0] >= -1 and p[2] <= width + 1, (size, one)
                    sides = [min(p[i + 2], q[i + 2]) - max(p[i], q[i]) for i in (0, 1)]
                    assert min(sides) < 2, (size, one, other)
                if 'SCREENSHOTS' in os.environ:
                    b.picture(ROOT / os.environ['SCREENSHOTS'] / f'{size}{"_dark" * dark}.png')
            nameless = b.run('''[...document.querySelectorAll("button, input, select, textarea")].filter(e =>
                !(e.ariaLabel || e.labels?.length || e.textContent.trim())).length''')
            assert nameless == 0 and b.complaints() == []


def test_a_page_is_replaced_whole_or_not_at_all(out, capsys, monkeypatch):
    """If the disk is full, the one that was there stays; a model too large, looks and edits are refused."""
    before = page_of(capsys).read_bytes()
    assert page_of(capsys, '--start', 'nurse').read_bytes() != before
    before = Path('page.html').read_bytes()

    def full(path, text, encoding):
        path.write_bytes(text[:100].encode())
        raise OSError(28, 'No space left on device')
    with monkeypatch.context() as patch:
        patch.setattr(Path, 'write_text', full)
        assert 'No space left' in error_of(sample, capsys, '--html', 'page.html')
    large = toy_subject(n_embd=512, n_layer=14).model
    save('large', large)
    assert 'a page takes up to 40M' in error_of(sample, capsys, '--html', 'page.html', '--from', 'large')
    for flags in (['--show', 'nurse'], ['--senses-off', 'nurse:0']):
        assert 'goes without' in error_of(sample, capsys, '--html', 'page.html', *flags)
    assert 'in a folder that exists' in error_of(sample, capsys, '--html', 'none/page.html')
    assert Path('page.html').read_bytes() == before
    assert sorted(path.name for path in Path().iterdir()) == ['large', 'out', 'page.html']
