"""The verbs: rucksack VERB where it is installed, python -m rucksack VERB in a clone."""

from functools import partial
from importlib import import_module

from rucksack.cli import run_cli
from rucksack.errors import UserError

VERBS = {  # verb -> its module in rucksack, and what it does
    'prepare': ('prepare', 'turn text into token ids, in data/NAME'),
    'train': ('train', 'train a model on data/NAME, in out/RUN'),
    'sample': ('sample', 'write a text without and with an edit of senses'),
    'show': ('looks.show', 'the words that senses of a word raise and lower most'),
    'find': ('looks.find', 'the senses that best separate two words'),
    'similar': ('looks.similar', 'the words most similar to a word, sense by sense'),
    'sweep': ('looks.sweep', 'the next words as a sense is scaled from 0 to 1'),
    'explain': ('looks.explain', 'what each sense of each token adds to a logit'),
    'probs': ('looks.probs', 'the probability of words after many prompts'),
    'edit': ('edits.edit', 'learn an edit from examples'),
    'eval': ('paper.eval', "the paper's tables"),
    'page': ('page.page', 'a web page that runs the model'),
    'export': ('hub.export', 'the model for Hugging Face transformers')}


def run(argv: list[str]) -> None:
    """Run the verb named by the first argument, and pass it the rest; without one, list all."""
    if not argv or argv[0] in ('-h', '--help'):
        for verb, (_, does) in VERBS.items():
            print(f'{verb:9}{does}')
        print('VERB --help lists the flags of a verb')
        return
    verb = argv[0]
    if verb not in VERBS:
        raise UserError(f'{verb!r} is not a command; give one of {", ".join(VERBS)}')
    module, _ = VERBS[verb]
    import_module(f'rucksack.{module}').main(argv[1:])


main = partial(run_cli, 'rucksack', run)

if __name__ == '__main__':
    main()
