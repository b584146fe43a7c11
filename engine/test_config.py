"""engine/config.py with a dataclass of its own: what any program may rely on."""
import io
import re
from dataclasses import dataclass
from typing import Literal

import pytest

from engine import config
from engine.config import UserError


@dataclass
class Model:
    """The base class's keys come first in --help."""
    width: int = 8                 # channels
    size: int = 0                  # the program sets it


@dataclass
class Config(Model):
    # how it is trained
    rate: float = 1e-3             # learning rate
    # a comment too long for the line of its key
    # stands above it
    decay: Literal['linear', 'none'] = 'linear'
    fast: bool = None              # None: if it pays
    name: str = ''                 # of the run
    lengths: list = range(1, 4)    # trained on

    DERIVED = ('size',)

    def __post_init__(self):
        if self.width <= 0:
            raise ValueError(f'width must be positive, not {self.width}')


VALUES = [('width', '1e2', 100), ('width', 4.0, 4), ('rate', '3', 3.0), ('rate', 1, 1.0),
          ('decay', 'none', 'none'), ('fast', 'true', True), ('fast', 'False', False),
          ('fast', 'None', None), ('name', '12', '12'), ('lengths', '2-4,7', [2, 3, 4, 7]),
          ('lengths', '5', [5]), ('lengths', '[(0, 5), (9, 7)]', [(0, 5), (9, 7)]),
          ('lengths', range(2), [0, 1])]


@pytest.mark.parametrize('key, given, value', VALUES)
def test_a_value_takes_the_type_of_its_field(key, given, value):
    found = config.check(Config, key, given, 'a test')
    assert found == value and type(found) is type(value)


REFUSED = [('width', '1.5', 'a test: width must be a whole number'),
           ('width', 'None', 'width must be a whole number'),
           ('width', True, 'width must be a whole number'),
           ('rate', 'x', "rate must be a number, not 'x'"),
           ('decay', 'exp', 'decay must be one of linear, none'),
           ('fast', '2', 'fast must be True or False'), ('name', 3, 'name must be text'),
           ('lengths', '1-', 'lengths must be a list as in 1-16'),
           ('lengths', '16-1,4', 'lengths must be a list as in 1-16'),
           ('rat', '1', "unknown key 'rat', did you mean 'rate'?"),
           ('zzz', '1', '--help lists the keys'), ('size', '3', "unknown key 'size'")]


@pytest.mark.parametrize('key, given, says', REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(key, given, says):
    with pytest.raises(UserError, match=re.escape(says)) as error:
        config.check(Config, key, given, 'a test')
    assert '\n' not in str(error.value)


def test_flags_come_after_files_and_files_in_order(tmp_path):
    a, b = tmp_path / 'a.py', tmp_path / 'b.py'
    a.write_text('rate = 0.5\nwidth = 2\n')
    b.write_text('rate = rate / 2\nlengths = range(width)\n')
    values = config.read(Config, [str(b), '--name=x=y', '--fast', '--width=3'])
    assert values == dict(width=3, rate=0.0005, decay='linear', fast=True, name='x=y',
                          lengths=list(range(8)))
    values = config.read(Config, [str(a), str(b)])
    assert values['rate'] == 0.25 and values['lengths'] == [0, 1] and values['fast'] is None


def test_a_file_may_hold_other_keys_only_where_a_program_says_so(tmp_path):
    path = tmp_path / 'a.py'
    path.write_text('width = 2\ntask = "copy"\n')
    assert config.read(Config, [str(path)], extra_keys_in_files=True)['width'] == 2
    with pytest.raises(UserError, match="a.py: unknown key 'task'"):
        config.read(Config, [str(path)])


def test_a_comma_list_sweeps_a_key():
    flags, words = config.parse(Config, ['--width=1,2', 'file.py', '--name=a,b'], swept=['width'])
    assert flags == dict(width=[1, 2], name='a,b') and words == ['file.py']
    assert isinstance(flags['width'], config.Sweep) and type(flags['name']) is str
    with pytest.raises(UserError, match='width must be a whole number'):
        config.parse(Config, ['--width=1,2'])


def test_values_that_do_not_fit_together_are_the_users_error():
    with pytest.raises(UserError, match='width must be positive'):
        config.make(Config, dict(width=0))


def test_a_name_that_is_not_known_suggests_the_nearest():
    config.check_name('task', 'copy', ['copy', 'sort'])
    with pytest.raises(UserError, match="unknown task 'cpy', did you mean 'copy'.*copy, sort"):
        config.check_name('task', 'cpy', ['copy', 'sort'])


def test_help_is_the_comments_of_the_fields(capsys):
    config.print_help('A program.', Config)
    out = capsys.readouterr().out
    assert out.startswith('A program.') and '\nhow it is trained\n' in out and '--size' not in out
    for line in ('--rate=0.001 +learning rate', '--width=8 +channels', '--lengths=1-3 +trained on',
                 '--decay=linear +a comment too long for the line of its key stands above it'):
        assert re.search(f'^  {line}', out, re.M), line


@pytest.mark.parametrize('error', [
    MemoryError(), RuntimeError('CUDA out of memory'),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError('other')], ids=repr)
def test_a_lack_of_memory_is_one_line(error, monkeypatch, capsys):
    def main(argv):
        raise error

    monkeypatch.setattr(config.sys, 'stdout', io.TextIOWrapper(io.BytesIO()))
    if error.args == ('other',):
        with pytest.raises(RuntimeError, match='other'):
            config.run(main)
        return
    with pytest.raises(SystemExit) as end:
        config.run(main)
    assert end.value.code == 2 and 'not enough memory' in capsys.readouterr().err
