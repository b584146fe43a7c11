"""Exercises: copies of this repository without some functions, which you write.

    python exercises/blank.py                     lists the exercises
    python exercises/blank.py rope                makes out/exercises/rope and prints what to do
    python exercises/blank.py rope --check        grades that copy (in a copy: grades this copy)
    python exercises/blank.py rope --show-diff    prints a diff of the copy against the original
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from train import check_name, need, run_program  # noqa: E402

GRADERS = ('exercises/test_graders.py', 'test_all.py')


class Exercise(NamedTuple):
    """What an exercise blanks, and the tests that grade it."""
    blanks: dict                    # {file: 'FUNCTION CLASS.METHOD ...'} that students write
    tests: str                      # names of its own tests, without test_
    variants: str = ''              # the VARIANTS of test_all.py that the contract is run for
    hides: dict = {}                # as blanks: blanked because it reveals the answer


EXERCISES = {
    'sinusoids': Exercise({'pe.py': 'sinusoids'},
                          'a_shift_is_a_rotation ape_and_tables_add_vectors', 'ape',
                          {'kernels.py': 'cos_sin_table'}),
    'rope': Exercise({'pe.py': 'rotate RoPE.theta RoPE.qk'}, 'rope', 'rope',
                     {'pe.py': 'YaRN.qk VRoPE.rotated', 'probe.py': 'LlamaAttention.project'}),
    'alibi': Exercise({'pe.py': 'ALiBi.slope ALiBi.bias'}, 'alibi_and_t5_add_a_bias',
                      'alibi, alibi+stickbreaking on 2 heads'),
    't5': Exercise({'pe.py': 'T5.bucket'}, 'alibi_and_t5_add_a_bias', 't5, pope+t5+fox'),
    'attention': Exercise({'kernels.py': 'forward_kernel'}, 'attention_kernels'),
    'pope': Exercise({'pe.py': 'PoPE.theta PoPE.qk polar'}, 'pope',
                     'pope, pope plain, pope half',
                     {'kernels.py': 'pope_attention_reference polar_reference polar_kernel '
                                    'polar_backward_kernel cos_sin_table angles',
                      'probe.py': 'polar'}),
    'vipe': Exercise({'pe.py': 'ViPE.qk ViPE.value ViPE.out'}, 'vipe',
                     'vipe, vipe logits only, vipe value only, nope',
                     {'kernels.py': 'vipe_attention_reference vipe_scaled'}),
    'prism': Exercise({'pe.py': 'algorithm_1'},
                      'sharpening_multiplies_exponents cursor_histogram_is_the_sum_over_all_paths',
                      'prism, prism copy',
                      {'kernels.py': 'after_reset after_step step_gradient '
                                     'scan_kernel scan_backward_kernel'}),
    'by_hand': Exercise({'probe.py': 'iteration_head'}, 'weights_by_hand'),
    'heads': Exercise({'probe.py': 'without_heads'},
                      'ablate_finds_the_head_that_carries_the_answer'),
    'break_it': Exercise({}, 'where_it_breaks'),
    'design': Exercise({}, 'your_own_encoding', 'mine')}


def functions(text):
    """Return {'FUNCTION' or 'CLASS.METHOD': its ast node} for the text of a file."""
    found = {}
    for node in ast.parse(text).body:
        inside = node.body if isinstance(node, ast.ClassDef) else []
        found |= {f'{node.name}.{x.name}': x for x in inside if isinstance(x, ast.FunctionDef)}
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
    return found


def blanked_files(name):
    """Return {path: text} of the files in which bodies are blanked; docstrings remain."""
    files, exercise = {}, EXERCISES[name]
    for places, message in ((exercise.blanks, f'{name}: write this'),
                            (exercise.hides, f'{name} hides this; do not write it')):
        for path, function in ((path, x) for path, xs in places.items() for x in xs.split()):
            text = files.get(path) or (ROOT / path).read_text()
            lines, node = text.splitlines(keepends=True), functions(text)[function]
            first = node.body[1 if ast.get_docstring(node) else 0]
            lines[first.lineno - 1:node.end_lineno] = [
                f"{' ' * first.col_offset}raise NotImplementedError('exercise {message}')\n"]
            files[path] = ''.join(lines)
    return files


def make_copy(name, folder):
    """Copy the repository to a folder, without history and records, and blank the functions."""
    need(not folder.exists(), f'{os.path.relpath(folder)} exists: delete it to start again')
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(
        '.*', '__pycache__', 'out', 'data', '*.jsonl', 'TEACHING.md'))
    for path, text in blanked_files(name).items():
        (folder / path).write_text(text)


def graders(name):
    """Return the pytest names of an exercise's graders: its own tests and, for an encoding, the
    contract, which is every test of test_all.py that runs for all VARIANTS."""
    tests = {path: functions((ROOT / path).read_text()) for path in GRADERS}
    contract = [test for test, node in tests['test_all.py'].items()
                if 'variants' in [ast.unparse(x) for x in node.decorator_list]]
    own = [f'{path}::test_{test}' for test in EXERCISES[name].tests.split()
           for path in GRADERS if f'test_{test}' in tests[path]]
    return own + [f'test_all.py::{test}[{variant}]' for test in contract
                  for variant in filter(None, EXERCISES[name].variants.split(', '))]


def section(name):
    """Return the section of exercises/README.md on an exercise."""
    text = Path(ROOT, 'exercises/README.md').read_text()
    return re.search(rf'^## \d+\. `{name}`.*?(?=^## |\Z)', text, re.M | re.S)[0].strip()


def main(argv):
    """Run the program and return its exit status."""
    name, flag = [*argv, '', ''][:2]
    if name in ('', '--help', '-h'):
        titles = [section(name).splitlines()[0].removeprefix('## ') for name in EXERCISES]
        print(__doc__ if name else '\n'.join(titles))
        return 0
    check_name('exercise', name, EXERCISES)
    need(flag in ('', '--check', '--show-diff'), f'unknown flag {flag}: use --check or --show-diff')
    folder, copied = ROOT / 'out/exercises' / name, not (ROOT / 'exercises/TEACHING.md').exists()
    need(flag == '--check' or not copied, 'this is a copy: run this in the original repository')
    need(not flag or copied or folder.exists(), f'first run: python exercises/blank.py {name}')
    if not flag:
        make_copy(name, folder)
        print(f'{section(name)}\n\nThe copy is {os.path.relpath(folder)}. To grade it, run in '
              f'it:\n    python exercises/blank.py {name} --check')
    elif flag == '--show-diff':
        for path in sorted({*EXERCISES[name].blanks, 'pe.py'}):
            both = [(root / path).read_text().splitlines() for root in (ROOT, folder)]
            print('\n'.join(difflib.unified_diff(*both, f'original/{path}', path, lineterm='')))
    else:
        # prints a line for each test, the errors, and the output of passing tests; if a test takes
        # 2 minutes, as in an endless loop, it prints the line reached and stops
        return subprocess.call([sys.executable, '-m', 'pytest', '-v', '--tb=line', '-rsP', '-p',
                                'no:cacheprovider', '-o', 'faulthandler_timeout=120', '-o',
                                'faulthandler_exit_on_timeout=true', *graders(name)],
                               cwd=folder if folder.exists() else ROOT)
    return 0


if __name__ == '__main__':
    run_program(main)
