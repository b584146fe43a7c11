"""Exercises: this repository with one thing taken out, for you to write.

    python exercises/blank.py                     lists the exercises
    python exercises/blank.py rope                makes out/exercises/rope and says what to do there
    python exercises/blank.py rope --check        grades it: a line for each test
    python exercises/blank.py rope --show-diff    what was written there against the original

In the copy, `python exercises/blank.py rope --check` grades the copy itself.
"""
import ast
import difflib
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from typing import NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from engine import config  # noqa: E402
from engine.config import UserError  # noqa: E402

CORE, OWN = 'test_all.py', 'exercises/test_graders.py'


class Exercise(NamedTuple):
    """What is taken out, FILE:FUNCTION or FILE:CLASS.METHOD, and what grades it."""
    blanks: list
    tests: list                     # pytest's names of tests
    encoding: str = ''              # the contract of test_all.py is graded for it
    hides: list = []                # taken out, too, because it tells the answer


EXERCISES = {
    'sinusoids': Exercise(
        ['pe.py:sinusoids'],
        [f'{OWN}::test_a_shift_is_a_rotation', f'{CORE}::test_ape'], 'ape'),
    'rope': Exercise(
        ['pe.py:rotate', 'pe.py:RoPE.qk'],
        [f'{CORE}::test_rope', f'{OWN}::test_half_split_pairs'], 'rope'),
    'alibi': Exercise(
        ['pe.py:ALiBi.__init__', 'pe.py:ALiBi.by_distance'],
        [f'{OWN}::test_slopes', f'{CORE}::test_alibi'], 'alibi'),
    't5': Exercise(['pe.py:T5.bucket'], [f'{CORE}::test_t5'], 't5'),
    'attention': Exercise(
        ['exercises/online.py:attention', 'kernels.py:forward_kernel'],
        [f'{OWN}::test_online_softmax', f'{OWN}::test_forward_kernel']),
    'pope': Exercise(
        ['pe.py:PoPE.theta', 'pe.py:PoPE.qk'],
        [f'{CORE}::test_pope'], 'pope',
        ['kernels.py:pope_attention_reference', 'kernels.py:polar_kernel']),
    'vipe': Exercise(
        ['pe.py:ViPE.rescale', 'pe.py:ViPE.out', 'pe.py:Encoding.expected_distance'],
        [f'{CORE}::test_vipe'], 'vipe',
        ['kernels.py:vipe_attention_reference', 'kernels.py:vipe_factors']),
    'prism': Exercise(
        ['pe.py:cursor_scan'],
        [f'{CORE}::test_cursor_machines', f'{CORE}::test_cursor_keeps_its_mass',
         f'{CORE}::test_cursor_histogram_is_the_sum_over_all_paths',
         f'{CORE}::test_sharpening_multiplies_exponents',
         f'{CORE}::test_cursor_scan_in_chunks'], 'prism', ['engine/scan.py:scan_kernel']),
    'by_hand': Exercise(['probes/by_hand.py:iteration_head'], [f'{OWN}::test_weights_by_hand']),
    'heads': Exercise(
        ['probes/toeplitz.py:without_heads'],
        ['probes/test_toeplitz.py::test_ablate_finds_the_head_that_carries_the_answer']),
    'break_it': Exercise([], [f'{OWN}::test_where_it_breaks']),
    'design': Exercise([], [f'{OWN}::test_your_own_encoding'], 'mine'),
}


def functions(source):
    """{'FUNCTION' or 'CLASS.METHOD': its node} of a file's text."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found |= {f'{node.name}.{x.name}': x for x in node.body
                      if isinstance(x, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = node
    return found


def take_out(source, names, exercise):
    """A file's text without the bodies of these functions; docstrings stay."""
    lines, found = source.splitlines(keepends=True), functions(source)
    for node in sorted((found[name] for name in names), key=lambda node: -node.lineno):
        first = node.body[1 if ast.get_docstring(node) else 0]
        indent = ' ' * first.col_offset
        lines[first.lineno - 1:node.end_lineno] = [
            f"{indent}raise NotImplementedError('exercise {exercise}: write this')\n"]
    return ''.join(lines)


def blanked_files(name):
    """{path: text} of the files from which the exercise takes something out."""
    exercise, by_file = EXERCISES[name], {}
    for place in [*exercise.blanks, *exercise.hides]:
        path, function = place.split(':')
        by_file.setdefault(path, []).append(function)
    return {path: take_out(read(path), found, name) for path, found in by_file.items()}


def read(path):
    """The text of a file of the repository."""
    with open(os.path.join(ROOT, path)) as f:
        return f.read()


def make_copy(name, folder):
    """Copy what is needed into an empty folder: no history, no results, nothing taken out."""
    if os.path.exists(folder):
        raise UserError(f'{os.path.relpath(folder)} is there: delete it, or go on with --check')
    skip = shutil.ignore_patterns('.*', '__pycache__', 'out', 'data', 'results', 'assets')
    shutil.copytree(ROOT, folder, ignore=skip)
    for path, text in blanked_files(name).items():
        with open(os.path.join(folder, path), 'w') as f:
            f.write(text)


def graders(name):
    """pytest's names of what grades an exercise: its own tests, and for an encoding the contract,
    which is every test of test_all.py that runs for all encodings."""
    exercise, contract = EXERCISES[name], []
    if exercise.encoding:
        contract = [test for test, node in functions(read(CORE)).items()
                    if any(getattr(x, 'id', '') == 'variants' for x in node.decorator_list)]
    return exercise.tests + [f'{CORE}::{test}[{exercise.encoding}]' for test in contract]


def check(name, folder):
    """Run the graders in a folder and print a line for each; whether all passed."""
    report = os.path.join(folder, 'grades.xml')
    subprocess.run([sys.executable, '-m', 'pytest', '-q', '--tb=line', '-p', 'no:cacheprovider',
                    f'--junitxml={report}', *graders(name)], cwd=folder, capture_output=True)
    grades = {}
    for case in ET.parse(report).iter('testcase') if os.path.exists(report) else ():
        test = case.get('name').partition('[')[0]
        bad = [child for child in case if child.tag in ('failure', 'error', 'skipped')]
        numbers = [f'{x.get("name")} {x.get("value")}' for x in case.iter('property')]
        grades.setdefault(test, []).append((reason(bad[0]) if bad else '', numbers))
    meanings = {test: (ast.get_docstring(node) or '').split('\n')[0]
                for path in {place.partition('::')[0] for place in graders(name)}
                for test, node in functions(read(path)).items()}
    for test, cases in grades.items():
        wrong = [message for message, _ in cases if message]
        words = test.removeprefix('test_').replace('_', ' ')
        print(f'{"fails" if wrong else "holds":6} {words}'
              + f' ({len(cases) - len(wrong)} of {len(cases)})' * (len(cases) > 1)
              + ''.join(f'; {x}' for _, numbers in cases for x in numbers))
        if wrong:
            print(f'       {meanings.get(test, "")}\n       {wrong[0].splitlines()[0][:150]}')
    good = sum(not any(message for message, _ in cases) for cases in grades.values())
    print(f'{good} of {len(grades)} hold' if grades else 'no test ran: pip install pytest')
    return bool(grades) and good == len(grades)


def reason(result):
    """Why a test did not hold, in a line: the last error that pytest shows."""
    errors = re.findall(r'^E +(\S.*)$', result.text or '', re.M)
    return errors[-1] if errors else result.get('message')


def section(name):
    """What exercises/README.md says of an exercise."""
    text = read('exercises/README.md')
    return re.search(rf'^## \d+\. `{name}`.*?(?=^## |\Z)', text, re.M | re.S)[0].strip()


def main(argv):
    """The program; returns the exit status."""
    if config.wants_help(argv):
        print(__doc__)
        return 0
    names = [arg for arg in argv if not arg.startswith('-')]
    flags = [arg for arg in argv if arg.startswith('-')]
    if not names and flags in ([], ['--list']):
        print(*(section(name).splitlines()[0].removeprefix('## ') for name in EXERCISES), sep='\n')
        return 0
    if len(names) != 1 or flags not in ([], ['--check'], ['--show-diff']):
        raise UserError('write the name of one exercise, and perhaps --check or --show-diff')
    name = names[0]
    config.check_name('exercise', name, EXERCISES)
    folder = os.path.join(ROOT, 'out/exercises', name)
    if not flags:
        make_copy(name, folder)
        print(section(name))
        print(f'\nThe copy is {os.path.relpath(folder)}. There, grade what you wrote:\n'
              f'    python exercises/blank.py {name} --check')
        return 0
    if flags == ['--check']:
        return not check(name, folder if os.path.exists(folder) else ROOT)
    if not os.path.exists(folder):
        raise UserError(f'make the copy first: python exercises/blank.py {name}')
    for path in sorted({place.partition(':')[0] for place in EXERCISES[name].blanks} | {'pe.py'}):
        with open(os.path.join(folder, path)) as f:
            written = f.read().splitlines()
        print('\n'.join(difflib.unified_diff(read(path).splitlines(), written, f'original/{path}',
                                             f'written/{path}', lineterm='')))
    return 0


if __name__ == '__main__':
    config.run(main)
