"""Exercises: this repository with one thing taken out, for you to write.

    python exercises/blank.py                     lists the exercises
    python exercises/blank.py rope                makes out/exercises/rope and says what to do there
    python exercises/blank.py rope --check        grades it, or this copy, with pytest
    python exercises/blank.py rope --show-diff    what was written there against the original
"""
import ast
import difflib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from train import UserError, check_name, run_program  # noqa: E402

CORE, OWN = 'test_all.py', 'exercises/test_graders.py'
MARK = 'exercises/this_copy'        # a file of each copy, with the exercise's name


class Exercise(NamedTuple):
    """What is taken out, FILE:FUNCTION or FILE:CLASS.METHOD, and what grades it."""
    blanks: list
    tests: list                     # pytest's names of tests
    variants: tuple = ()            # of test_all.py: its contract is graded for these
    hides: tuple = ()               # taken out, too, because it tells the answer


EXERCISES = {
    'sinusoids': Exercise(
        ['pe.py:sinusoids'], [f'{OWN}::test_a_shift_is_a_rotation', f'{CORE}::test_ape'],
        ['ape'], ['kernels.py:cos_sin_table']),
    'rope': Exercise(
        ['pe.py:rotate', 'pe.py:RoPE.qk'],
        [f'{CORE}::test_logits_are_their_equation[{x}]' for x in ('rope', 'rope fraction')],
        ['rope', 'rope fraction'],
        ['pe.py:YaRN.qk', 'pe.py:SelectiveRoPE.qk', 'pe.py:VRoPE.rotated', 'probe.py:LlamaRoPE.qk',
         'probe.py:LlamaAttention.project']),
    'alibi': Exercise(
        ['pe.py:ALiBi.__init__', 'pe.py:ALiBi.bias'],
        [f'{CORE}::test_logits_are_their_equation[alibi]',
         f'{CORE}::test_alibi_has_the_published_slopes'], ['alibi', 'alibi on 2 heads']),
    't5': Exercise(
        ['pe.py:T5.bucket'], [f'{CORE}::test_t5'], ['t5', 't5 24']),
    'attention': Exercise(
        ['exercises/online.py:attention', 'kernels.py:forward_kernel'],
        [f'{OWN}::test_online_softmax', f'{OWN}::test_forward_kernel']),
    'pope': Exercise(
        ['pe.py:PoPE.theta', 'pe.py:PoPE.qk', 'pe.py:polar'], [f'{CORE}::test_pope'],
        ['pope', 'pope uniform', 'pope no delta', 'pope no softplus', 'pope half'],
        ['kernels.py:pope_attention_reference', 'kernels.py:polar_reference',
         'kernels.py:polar_kernel', 'kernels.py:polar_backward_kernel', 'kernels.py:cos_sin_table',
         'probe.py:polar']),
    'vipe': Exercise(
        ['pe.py:ViPE.factors', 'pe.py:ViPE.value', 'pe.py:ViPE.out'], [f'{CORE}::test_vipe'],
        ['vipe', 'vipe logits only', 'vipe value only', 'vipe s global', 'vipe d_p', 'nope'],
        ['kernels.py:vipe_attention_reference', 'kernels.py:vipe_factors', 'pe.py:SSMax.qk']),
    'prism': Exercise(
        ['pe.py:algorithm_1'],
        [f'{CORE}::test_{x}' for x in (
            'cursor_keeps_its_mass', 'sharpening_multiplies_exponents',
            'cursor_histogram_is_the_sum_over_all_paths', 'cursor_scan_in_chunks')],
        ['prism', 'prism copy'],
        [f'kernels.py:{x}' for x in (
            'cursor_scan_reference', 'after_reset', 'after_step', 'step_gradient', 'scan_kernel',
            'scan_backward_kernel')]),
    'by_hand': Exercise(['probe.py:iteration_head'], [f'{OWN}::test_weights_by_hand']),
    'heads': Exercise(
        ['probe.py:without_heads'],
        [f'{CORE}::test_ablate_finds_the_head_that_carries_the_answer']),
    'break_it': Exercise([], [f'{OWN}::test_where_it_breaks']),
    'design': Exercise([], [f'{OWN}::test_your_own_encoding'], ['mine']),
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


def take_out(source, function, message):
    """A file's text without the body of a function; its docstring stays."""
    lines, node = source.splitlines(keepends=True), functions(source)[function]
    first = node.body[1 if ast.get_docstring(node) else 0]
    indent = ' ' * first.col_offset
    lines[first.lineno - 1:node.end_lineno] = [
        f"{indent}raise NotImplementedError('exercise {message}')\n"]
    return ''.join(lines)


def blanked_files(name, files=None):
    """{path: text} of the files from which the exercise takes something out, added to `files`."""
    files = {} if files is None else files
    for places, message in ((EXERCISES[name].blanks, f'{name}: write this'),
                            (EXERCISES[name].hides, f'{name} hides this, it is not yours')):
        for path, function in (place.split(':') for place in places):
            files[path] = take_out(files.get(path) or read(path), function, message)
    return files


def read(path, root=ROOT):
    """The text of a file of the repository, or of a copy."""
    return Path(root, path).read_text()


def make_copy(name, folder):
    """Copy the repository, without its history and records, into a new folder, and take out."""
    if os.path.exists(folder):
        raise UserError(f'{os.path.relpath(folder)} is there: delete it to start again')
    skip = shutil.ignore_patterns('.*', '__pycache__', 'out', 'data', '*.jsonl', 'assets',
                                  'TEACHING.md')
    shutil.copytree(ROOT, folder, ignore=skip)
    for path, text in (blanked_files(name) | {MARK: name}).items():
        Path(folder, path).write_text(text)


def graders(name):
    """pytest's names of what grades an exercise: its own tests, and for an encoding the contract,
    which is every test of test_all.py that runs for all encodings."""
    contract = [test for test, node in functions(read(CORE)).items()
                if [ast.unparse(x) for x in node.decorator_list] == ['variants']]
    return EXERCISES[name].tests + [f'{CORE}::{test}[{variant}]' for test in contract
                                    for variant in EXERCISES[name].variants]


def check(name, folder):
    """Run the graders in a folder: whether all pass. pytest prints a line for each, then errors."""
    command = [sys.executable, '-m', 'pytest', '-v', '--tb=short', '--no-header', '-p',
               'no:cacheprovider', *graders(name)]
    try:
        return not subprocess.run(command, cwd=folder, timeout=1800).returncode
    except subprocess.TimeoutExpired:
        raise UserError('no result after 30 minutes: is there an endless loop?') from None


def section(name):
    """What exercises/README.md says of an exercise."""
    text = read('exercises/README.md')
    return re.search(rf'^## \d+\. `{name}`.*?(?=^## |\Z)', text, re.M | re.S)[0].strip()


def main(argv):
    """The program; returns the exit status."""
    if {'-h', '--help'} & set(argv):
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
    check_name('exercise', name, EXERCISES)
    folder = os.path.join(ROOT, 'out/exercises', name)
    if os.path.exists(os.path.join(ROOT, MARK)):
        if flags != ['--check'] or read(MARK) != name:
            raise UserError(f'this is the copy of {read(MARK)}: here only `{read(MARK)} --check`')
        folder = ROOT
    if not flags:
        make_copy(name, folder)
        print(section(name))
        print(f'\nThe copy is {os.path.relpath(folder)}. There, grade what you wrote:\n'
              f'    python exercises/blank.py {name} --check')
        return 0
    if not os.path.exists(folder):
        raise UserError(f'make the copy first: python exercises/blank.py {name}')
    if flags == ['--check']:
        print(f'grading {os.path.relpath(folder)}', flush=True)
        return not check(name, folder)
    for path in sorted({place.partition(':')[0] for place in EXERCISES[name].blanks} | {'pe.py'}):
        both = read(path).splitlines(), read(path, folder).splitlines()
        print('\n'.join(difflib.unified_diff(*both, f'original/{path}', path, lineterm='')))
    return 0


if __name__ == '__main__':
    run_program(main)
