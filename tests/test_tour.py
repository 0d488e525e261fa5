"""The claim of docs/tour.ipynb: it runs, and prints what it shows."""

import copy

import pytest
from helpers import ROOT, not_printed

nbformat = pytest.importorskip('nbformat')
nbclient = pytest.importorskip('nbclient')
TOUR = nbformat.read(ROOT / 'docs' / 'tour.ipynb', as_version=4)


def printed(notebook) -> str:
    """Collect what the cells of a notebook print."""
    outputs = [output for cell in notebook.cells for output in cell.get('outputs', [])]
    return '\n'.join(output.text for output in outputs if output.output_type == 'stream')


@pytest.mark.slow
def test_the_tour_prints_what_it_shows():
    """The tour's cells print the same numbers and words when they run again."""
    again = copy.deepcopy(TOUR)
    resources = {'metadata': {'path': str(ROOT / 'docs')}}
    nbclient.NotebookClient(again, kernel_name='python3', resources=resources).execute()
    assert not_printed(printed(TOUR).splitlines(), printed(again)) == []
