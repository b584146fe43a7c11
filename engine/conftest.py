"""What several tests of the engine start from."""
import json

import pytest


@pytest.fixture
def cfq(tmp_path):
    """A small folder in CFQ's format."""
    entries = [{'questionPatternModEntities': f"Did M{i}'s writer , a film editor, write M1", 'sparqlPatternModEntities':
                f'SELECT count(*) WHERE {{\n?x0 a ns:film.editor .\n?x0 ns:people.{"x" * (i % 3)} m.0{i}' + ' .\nM1 ns:x ?x1' * (i % 2) + '\n}'} for i in range(20)]
    (tmp_path / 'splits').mkdir()
    (tmp_path / 'dataset.json').write_text(json.dumps(entries))
    for name, parts in (('random_split', (12, 16)), ('mcd1', (4, 8))):
        order = list(range(20)) if name == 'random_split' else list(range(20))[::-1]
        (tmp_path / f'splits/{name}.json').write_text(json.dumps(dict(trainIdxs=order[:parts[0]], devIdxs=order[parts[0]:parts[1]], testIdxs=order[parts[1]:])))
    return tmp_path
