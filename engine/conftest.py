"""What several tests of the engine start from."""
import json
import os

os.environ.setdefault('OMP_NUM_THREADS', '1')  # before torch: more threads only wait for each other
import pytest

import tasks


@pytest.fixture
def cfq(tmp_path):
    """A folder of 20 questions in CFQ's format, with a random split and the split mcd1."""
    entries = []
    for i in range(20):
        question = f"Did M{i}'s writer , a film editor, write M1"
        second = ' .\nM1 ns:x ?x1' * (i % 2)
        query = ('SELECT count(*) WHERE {\n?x0 a ns:film.editor .\n'
                 f'?x0 ns:people.{"x" * (i % 3)} m.0{i}{second}\n}}')
        entries.append({'questionPatternModEntities': question, 'sparqlPatternModEntities': query})
    (tmp_path / 'dataset.json').write_text(json.dumps(entries))
    (tmp_path / 'splits').mkdir()
    forward, backward = list(range(20)), list(range(20))[::-1]
    for name, order, a, b in (('random_split', forward, 12, 16), ('mcd1', backward, 4, 8)):
        split = dict(trainIdxs=order[:a], devIdxs=order[a:b], testIdxs=order[b:])
        (tmp_path / f'splits/{name}.json').write_text(json.dumps(split))
    return tmp_path


@pytest.fixture
def midi(tmp_path):
    """A folder with three MIDI files of the same five notes."""
    symusic = pytest.importorskip('symusic')
    score = symusic.Score(480)
    track = symusic.Track(program=0)
    for i, pitch in enumerate((60, 64, 67, 21, 108)):
        track.notes.append(symusic.Note(480 * i, 240, pitch, 64))
    score.tracks.append(track)
    for part in tasks.PARTS:
        score.dump_midi(tmp_path / f'{part}.mid')
    return tmp_path
