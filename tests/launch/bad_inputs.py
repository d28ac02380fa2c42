"""Wrong command lines, and words that the one-line error message of each must contain.

{'COMMAND and its first arguments': [('more arguments', [word, ...])]}; bad_inputs_test.py runs all.
"""

import dataclasses
import json
import os
import pathlib
import shutil

from configs import tiny
from moddepth_jax.data.tokenizers.json_tokenizer import train_bpe
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.training.run_dir import open_workdir
from tests.data.prepared_text import prepare
from tests.forked_commands import ROOT
from tests.launch.commands import write_words
from tests.saved_run import save_run

# In the folder that `make_folder` fills.
COMMANDS = {
    'train --config=configs/tiny.py': [
        ('--config.training.accumulate_steps=3', ['steps=3', 'data.batch_size=8']),
        ('--config.model.num_layers=0', ['num_layers=0: must be 1 or more']),
        ('--config.model.num_kv_heads=3', ['num_kv_heads=3: must divide', 'num_heads=2']),
        ('--config.model.vocab_size=100', ['vocab_size=100', 'at least 257']),
        ('--config.model.dtype=fp16', ["'fp16'", 'bfloat16']),
        ('--config.model.routing.capacity=12.5', ['capacity=12.5', '(0, 1]']),
        ('--config.model.routing.router=lerned', ["'lerned'", 'mean learned?']),
        ('--config.model.routing.layers=every2', ["'every2'", 'every:N']),
        ('--config.optimizer.name=sgd', ["'sgd'", 'adamw, lion']),
        ('--config.training.num_steps=-5', ['num_steps=-5: must be 0 or more']),
        ('--config.data.batch_size=0', ['batch_size=0: must be 1 or more']),
        ('--config.data.tokenizer=gpt2', ["'gpt2'", 'bytes, prepared, a tokenizer.json']),
        ('--config.data.source=https://a.org/b.txt', ['https:', 'a URL; download it']),
        ('--config.model.routing.layers=[1]', ["'[1]'", 'or a list such as 0,1 of layers below 4']),
        ('--config.data.source=nothing', ["'nothing': holds no file", 'a file, folder or glob']),
        ('--profile=20', ['--profile=20: must be START:STOP']),
        ('--workdir=new --profile=300:310', ['--profile=300:310: this run has 200 steps']),
        ('--config.data.source=/', ["data.source='/': is ", ' folder of texts', 'must be stdlib']),
        ('--config.data.source=many.jsonl', ["'field7', 12 more"]),
        ("'--config.data.source=text/*.md'", ['text/*.md', 'no file']),
        ("'--config.data.source=text/*.parquet'", ['bad.parquet', 'parquet']),
        ("'--config.data.source=text/empty*.txt'", ['empty*.txt', 'no byte']),
        ('--config.data.source=text/short.txt', ['data.sequence_length=128']),
        ('--config.data.source=other/latin.md', ['byte 3 is 0xe9', 'data.encoding=latin']),
        ('--config.data.encoding=utf9', ["data.encoding='utf9': must be an encoding"]),
        ('--config.seed=7 --workdir=taken', ['taken', 'seed is 0', 'and 7']),
        ('--workdir=text', ['--workdir=', 'text', 'config.json']),
        ("'--workdir=a\nb'", [r"'a\nb'", 'without line ends']),
        ('--workdir=text/short.txt/run', ['--workdir=', 'directory']),
        ('--mesh=data=3', ['--mesh=data=3', 'there are 1']),
        ('--mesh=data=two', ['--mesh=data=two: must be AXIS=SIZE']),
        ('--mesh=modle=2', ['--mesh=modle=2', 'data, fsdp']),
        ('--dry_run --mesh=fsdp=2000', ['--mesh=fsdp=2000', 'must be 1024 or fewer']),
        ('--dry_run --mesh=fsdp=3', ['data.batch_size=8']),
    ],
    'train': [
        ('--config=configs/mod_isoflop.py:budget=1e3', ['flop_budget=1000', 'step']),
        ('--config=configs/mod_isoflop.py:budget=lots', ["budget='lots'"]),
        ('--config=configs/mod_isoflop.py:size=4x64 budget=1e9', [':size=4x64,budget=1e9']),
        ('--config=run', ['--config=run:', 'did you mean run/config.json?']),
        ('--config=taken/metrics.jsonl', ['did you mean taken/config.json?']),
    ],
    'train --config=configs/tiny.py --config.data.source=store': [
        ('--config.data.tokenizer=prepared', ['store/train.bin: was changed', 'remove store and']),
    ],
    'train --config=run/config.json --workdir=run': [
        ('--config.training.num_steps=2', ['num_steps=2: the run', 'has 4 steps; 4 resumes it']),
        ('--config.training.num_steps=8 --config.seed=1', ['seed is 0', 'and 1 in this run']),
    ],
    'evaluate': [
        ('', ['--workdir: missing']),
        ('run', ['run: unexpected', 'mean --workdir=run?']),
        ('--config=configs/tiny.py', ['no such flag', 'the run of --workdir has']),
        ('--workdir=./runn', ['runn: holds no config.json', 'did you mean run?']),
        ('--workdir=run/checkpoints/4', ['4: holds no config.json', 'did you mean run?']),
        ('--workdir=.', ['.: holds no config.json', 'of launch.train, such as run']),
        ('--workdir=other', ['--workdir=', 'other', 'config.json']),
    ],
    'evaluate --workdir=run': [
        ('--routing=aux_loss', ["'aux_loss'", 'predictor']),
        ('--routing=top_k', ["'top_k'", 'top_c, predictor']),
        ('--num_batches=-1', ['--num_batches=-1', 'non-negative']),
        ('--step=3', ['--step=3: no checkpoint of run', 'steps kept: 4']),
        ('--loops=2', ['--loops=2: no block of this run is looped']),
        ('--loops=0', ['--loops=0']),
        ('--exit_threshold=0.1', ['--exit_threshold=0.1: no block of this run is looped']),
        ('--exit_threshold=0.1 --routing=top_c', ['--exit_threshold=0.1: no token exits under']),
        ("'--data=*.rst'", ['--data=', '*.rst', 'no file']),
        ('--data=other/short.txt', ['6 tokens', 'needs 33']),
        ("'--data=other/*.jsonl'", ['--text_field', "'body'"]),
        ('--data=other/utf-16', ['utf-16: begins with the byte-order', 'set --encoding=utf-16']),
        ('--encoding=utf-16', ['--encoding=utf-16: belongs to --data or --domains']),
        ('--text_field=body', ['--text_field=body', '--data or --domains']),
        ("--domains=other '--data=*.txt'", ['--domains=', 'other', 'combined with --data']),
        ("'--data=text/?.txt' --num_batches=1 --json=no/a.json", ['no/a.json: No such file']),
        ("'--data=text/?.txt' --num_batches=1 --json=text", ['Is a directory; must be a file']),
        ('--num_batches=1 --json=/dev/null', ['--json=/dev/null: must be a regular file, or -']),
        ('--num_batches=1 --json=/dev/stdout', ['--json=/dev/stdout: must be', '- for stdout']),
        ('--num_batches=1 --json=other/pipe', ['--json=other/pipe: must be a regular file']),
    ],
    'generate': [
        ('--workdir=taken', ['no finished checkpoint', 'launch.train']),
        (
            "'--workdir=a run'",
            ['a run: holds no', "--config='a run/config.json' --workdir='a run'"],
        ),
    ],
    'generate --workdir=run': [
        ('--prompt=abc --chat', ['--chat: needs a terminal']),
        ('--prompt=abc --draft_tokens=-1', ['draft_tokens=-1: must be 0']),
        ('--prompt=abc --max_tokens=29', ['29 to generate', 'shorten the prompt by 1 or gen']),
        (f'--prompt={"x" * 400}', ['401 tokens and 1', '=32: shorten the prompt by 370']),
        ('--temperature=-1', ['temperature=-1', '0 (the most likely']),
        ('--top_p=95', ['top_p=95', '(0, 1]']),
        ('--top_k=-1', ['top_k=-1: must be 0, for every token, or more']),
        ('--prompts=other/pipe', ['other/pipe: cannot be read (a pipe, not a regular file)']),
        ('--prompts=other/latin.md', ['latin.md: byte 3 is 0xe9', '--encoding=latin-1']),
        ('--prompts=other/windows.jsonl', ["no field 'prompt'; set --text_field", "'body'"]),
        ('--prompts=text/0.txt --max_tokens=29', ['prompt 1 of ', ' to generate', 'shorten the']),
        ('--prompts=a.txt --prompt=a', ['--prompts=a.txt: cannot be combined with --prompt']),
        ('--prompt=a --text_field=b', ['--text_field=b: belongs to --prompts, which is missing']),
        ('--prompt=a --encoding=latin-1', ['--encoding=latin-1: belongs to --prompts or a pipe']),
        ('--num_tokens=100', ['--num_tokens=100: no such flag', '--max_tokens?']),
        ('--temp=0.5', ['--temp=0.5: no such flag; did you mean --temperature?']),
        ('--prompt=def main', ['main: unexpected after --prompt=def;', 'with spaces is quoted']),
        ('--routing=top_c', ["routing='top_c'", 'later tokens']),
        ('--max_tokens=0', ['--max_tokens=0', 'positive']),
    ],
    'inspect --workdir=run --out=/proc/no': [
        ("'--text=a b'", ['--out=/proc/no: No such file or directory; must be a directory that']),
    ],
    'inspect --workdir=run --out=no': [
        ('--text=other/empty.py', ['empty.py: is empty']),
        ('--text=', ['--text=: is empty']),
        ('--text=gone.py', ['gone.py: no such file', '--text=-']),
        ('--text=.', ['a directory, not a regular file']),
        ('--text=other/latin.md', ['latin.md: byte 3 is 0xe9', '--encoding=latin-1']),
        ('--text=other/pipe', ['other/pipe: a pipe, not a regular file']),
        ("'--text=a b' --routing=aux_loss", ["'aux_loss'"]),
    ],
    'inspect': [
        ("--workdir=run '--text=a b' --out=text/0.txt", ['0.txt: is a file']),
        ("--workdir=run '--text=a b' --out=taken", ['taken: is the directory of a run']),
        ('--workdir=run --out=no', ['--text: missing', 'A file']),
        ("--workdir=run --out=no --importance '--text=a b'", ['--text=a b: not with --importance']),
        ("--workdir=run --out=no '--text=a b' --num_batches=3", ['--num_batches=3: belongs to']),
    ],
    'prepare --input=other/windows.jsonl': [  # its directory keeps a lock, and finished parts
        ('--output=cache/b --processes=1', ["line 1: no field 'text'", 'set --text_field to one']),
    ],
    'convert': [
        ('', ['--workdir and one of', 'nothing was given']),
        ('--workdir=dense', ['one of --from_hf, --to_hf', '--workdir was given']),
        ('--from_hf=gone --to_hf=x --workdir=y', ['--from_hf, --to_hf was']),
        ('--from_workdir=run --workdir=new', ['needs --config=', 'run/config.json']),
        ('--from_hf=nested --workdir=new', ['nested/config.json', 'nested more than 64 deep']),
        ('--from_hf=hf --workdir=new --step=2', ['--step=2: does not belong to --from_hf']),
        ('--from_hf=hf --workdir=run', ['run: holds', 'new or empty']),
        ('--from_hf=small --workdir=new', ['has ids up to 261', 'model has 250']),
        ('--from_hf=meta/Llama --workdir=new', ['no such folder', 'hf download meta/Llama --l']),
        (
            '--from_hf=gpt2 --workdir=new',
            ['no such folder', 'hf download ORGANISATION/gpt2 --local-dir gpt2'],
        ),
        ('--from_hf=run --workdir=new', ['--from_hf=run: is a run; write --from_workdir=run']),
        ('--from_workdir=hf --workdir=new', ['is a Hugging Face model; write --from_hf=hf']),
        ('--workdir=run --to_hf=run', ['--to_hf=run: holds', 'new or empty']),
        ('--branch=run --workdir=new --step=3', ['--step=3: no checkpoint of run', 'kept: 4']),
        ('--branch=dense --workdir=new', ['no checkpoint of dense', 'steps kept: none']),
        ('--branch=runn --workdir=new', ['--branch=runn: holds no config.json', 'mean run?']),
        ('--branch=hf --workdir=new', ['--branch=hf: is a Hugging Face model']),
        ('--branch=run --workdir=run', ['--workdir=run: holds', 'new or empty']),
        ('--from_workdir=runn --workdir=new --config=run/config.json', ['--from_workdir=runn: ho']),
    ],
    'convert --from_workdir=dense --workdir=new --config=dense/config.json': [
        ('--config.model.d_ff=32', ['model.d_ff=32: is 64 in the run that is converted']),
        ('--from_layers=one', ['=one: must be average, first, last, or 2 layers']),
        ('--from_layers=0,7', ['--from_layers=0,7: must be', 'from 0 to 1']),
        ('--config.model.num_layers=1', ['blocks from layers of a dense run by --from_layers']),
        ('--config.training.distill_from=gone', ["distill_from='gone': holds no config.json"]),
        ('--config.model.adapters.rank=2 --config.model.adapters.params=x', ['no matrix has such']),
        # Before anything is computed or loaded.
        ('--config.flop_budget=1 --config.training.num_steps=0', ['flop_budget=1: pays for no st']),
        ('--config.model.dtype=float64', ['needs JAX_ENABLE_X64=1']),
    ],
    'convert --from_hf=hf --workdir=new': [
        ('--config.flop_budget=1 --config.training.num_steps=0', ['flop_budget=1: pays for no st']),
        ('--dtype=float32', ['belongs to --to_hf']),
        ('--from_layers=first', ['--from_layers=first: belongs to --from_workdir']),
        ('--config.model.d_model=32', ['d_model=32: is 16 in', 'leave it out']),
        ('--config.model.routing.router=learned', ['comes in dense; --from_workdir adds routing']),
    ],
    'convert --workdir=new': [  # `exported`: folders that were exported from here
        ('--from_hf=exported/none', ["none/config.json: holds no 'knobs'; must be an object"]),
        ('--from_hf=https://huggingface.co/meta/Llama/tree/main', ['meta/Llama --local-dir Llama']),
        ('--from_hf=exported/typed', ['model.num_layers']),
        ('--from_hf=exported/grouped', ['model.routing']),
        ('--from_hf=exported/unknown', ['unheard_of']),
        ('--from_hf=exported/wide --config.model.d_model=32', ['=32: is 64 in exported/wide/']),
    ],
    'compare': [
        ('', ['RUN: missing', 'one run or more']),
        ('gone taken', ['gone: holds no config.json']),
        ('run,taken', ['run,taken: no such directory; separate runs by spaces']),
        ('--workdir=run', ['no such flag', '--out, ', 'without a flag RUN ... directories of']),
        ("'a run'", ['finish it: ', "launch.train --config='a run/config.json' --workdir='a run'"]),
    ],
    'isoflop': [
        ('--config=configs/tiny.py --sizes=2x64 --budgets=1e9', ['tiny.py of size 2x64', 'study']),
        ('--config=configs/study.py --sizes=2x64,4 --budgets=1e9', ["size='4'", 'LAYERSxWIDTH']),
    ],
    'isoflop --config=configs/study.py --workdir=new --sizes=2x64': [
        ('--budgets=1e3', ['dense at size 2x64: flop_budget=1000: pays for no']),
        ('--budgets=1e9 --steps=5', ['give either --budgets (training FLOPs) or --steps']),
        ('--budgets=few', ['--budgets=few: must be numbers', '6e11']),
        ('--budget=1e9', ['--budget=1e9: no such flag; did you mean --budgets?']),
        ('--budgets=1e9, 2e9', ['has a space inside; write --budgets=1e9,2e9']),
        ('--budgets=1e9 --seeds=0-2', ['--seeds=0-2: must be whole numbers', '0,1,2']),
        ('--budgets=1e9 --variants=dense,mods', ["'mods'", 'did you mean mod?']),
        ('--budgets=1e9 --shard=2/2', ['--shard=2/2']),
    ],
    'claims': [
        ('study', ['study: unexpected', 'mean --workdir=study?']),
        ('--workdir=nothing', ['no study.json in it or up to 3 levels below']),
        ('--workdir=study --page=page.md', ['page without its markers: must hold <!-- claims:']),
    ],
    'gpu': [
        ('--out=no --cases=right/mosaic_gup', ['--cases=right/mosaic_gup', '--list']),
        ('--report', ['--out=DIR']),
    ],
    'bench': [
        ('', ['no benchmark', 'step, decode, prompts, pytorch, depth, loops, experts']),
        ('dekode', ['dekode', 'step, decode, prompts, pytorch, depth, loops, experts']),
        ('attention --implementations=cudn', ["--implementations='cudn'", 'did you mean cudnn?']),
        ('attention --heads=6 --kv_heads=4', ['--kv_heads=4', '--heads=6']),
        ('experts --shapes=64x32x16x4x5', ['--shapes=64x32x16x4x5', 'five numbers', 'last']),
        ('experts --size=6x128', ['--size: experts has no such flag']),
        ('decode --batches=0', ['--batches=0', 'numbers']),
        ('decode --size=2x64 --kv_heads=3', ['3', 'divide']),
        ('decode --size=2x64 --context=64 --prompt=100', ['--prompt=100', '64']),
        ('prompts --chunk=8192', ['--chunk=8192: must be from 1 to --length=4096']),
        ('depth --depths=8,deep', ['--depths=8,deep', 'numbers']),
        ('depth --size=16x100', ['16x100', 'multiple of 64']),
        ('depth --tokens=64', ['--tokens: depth has no such flag; only step has it']),
        ('step --variants=mode,dense', ['--variants=mode,dense', 'begin with dense']),
        ('step --variants=dense,mood', ['--variants=mood', 'mod_moda', 'mode', 'did you mean']),
        ('pytorch --shapes=1x2', ['--shapes=1x2: must be six numbers', 'a multiple of 64']),
        ('runs', ['--workdirs: must name the directories of one run or more']),
        ('depth --variants=moda', ['--variants=moda', 'begin with dense']),
    ],
    'backends': [
        ('tiny --page=page.md', ['page without its markers: must hold <!-- backends:']),
        ('tinny', ['tinny: must be one of attnres, base, dense_isoflop', 'did you mean tiny?']),
    ],
    'dry_run': [
        ('', ['no argument', 'table or again, then one FILE']),
        ('again', ['again: must', 'then one FILE']),
    ],
    'local': [
        ('--config=configs/tiny.py', ['=configs/tiny.py: no such flag', 'follow --']),
        ('--proceses=2', ['--proceses=2', 'mean --processes?']),
    ],
    'prepare --input=text/?.txt --output=none': [
        ('--tokenizer=bpe:many', ['--tokenizer=bpe:many: must be bpe:N']),
        ('--tokenizer=bpe:256', ['--tokenizer=bpe:256: must be bpe:N', '257 or more']),
        ('--tokenizer=gone.json', ['--tokenizer=gone.json: ', 'no such tokenizer']),
        ('--separator=x', ['--tokenizer=bytes', "separator='x': leave it out"]),
    ],
    'prepare': [
        ("'--input=*.csv' --output=no", ['*.csv', 'matches no file']),
        ("'--input=text/?.txt'", ['--output: missing']),
    ],
}
# These import a library that takes seconds, and run with the slow tests.
SLOW = {
    'lm_eval --workdir=run': [
        ('--tasks=hellaswagg', ["'hellaswagg'", 'group or tag', 'did you mean hellaswag?']),
        ('--tasks=arc_easy --routing=top_c', ['top_c', 'later']),
        ('--tasks=toy_choice --limit=0', ['--limit=0', 'whole number']),
        ('--tasks=toy_choice --limit=1.5', ['--limit=1.5', 'whole number']),
        ('', ['--tasks: missing']),
    ],
}

# Of a toy command that all commands behave as: flags, --config, overrides, files in the folder {}.
TOY = {
    '': [
        ('--config.seed=1 --config=configs/base.py', ['=1:', '--config=FILE.py first']),
        ('', ['--config: missing', 'configs/tiny.py', '--list']),
        ('configs/tiny.py', ['configs/tiny.py: unexpected', 'mean --config=configs/tiny.py?']),
        ('tiny --config.seed=1', ['tiny: unexpected', 'mean --config=configs/tiny.py?']),
        ('--config=tiny', ['--config=tiny:', 'did you mean configs/tiny.py?']),
        ('--config=configs/tiny', ['--config=configs/tiny:', 'did you mean configs/tiny.py?']),
        ('--config=config/tinny.py:x', ['/tinny.py:x:', 'did you mean configs/tiny.py:x?']),
        ('--config=zzz.py', ['zzz.py:', '--list shows']),
        ('--config', ['--config: missing value; write --config=VALUE']),
        ('--config = configs/tiny.py', ['has a space', 'write --config=configs/tiny.py']),
        ('—config=configs/tiny.py', ['unexpected; did you mean --config=configs/tiny.py?']),
        ('--config=configs/mod_isoflop.py:size=4by64', ["size='4by64'", 'LAYERSxWIDTH']),
        ('--config=configs/mod_isoflop.py:steps=9', ["'steps'", 'it takes size, budget']),
        ('--list=rooting', ['--list=rooting', 'did you mean routing?']),
        ('--list rooting', ['--list=rooting', 'did you mean routing?']),
        ('--list=lr', ['--list=lr', 'did you mean --config.optimizer.learning_rate?']),
        ('--config.seed=1', ['--config.seed=1:', '--config=FILE.py']),
        ('--config=configs/bsae.py', ['configs/bsae.py:', 'mean configs/base.py?']),
        ('--config=configs/', ['--config=configs/:', 'no such Python file']),
        ('--config=configs/base.py:4', ['configs/base.py:4:', 'no text after the colon']),
        ('--config={}/text.py', ['text.py:', 'FILE.py:TEXT']),
        ('--config={}/returns.py', ['returns.py:', 'returned dict', 'ConfigDict']),
        ('--config={}/refuses.py', ['refuses.py:', 'flop_budget=-1: must be 0 or more']),
        ('--config={}/syntax.py', ['syntax.py:', 'line 1']),
        ('--config={}/mistyped.py', ['mistyped.py:4: modle: no such knob', 'mean model?']),
        ('--config={}/ill_typed.py', ['ill_typed.py:4: num_layers=three: must be int, not str']),
        ('--config={}/buggy.py', ['buggy.py:2: ZeroDivisionError: division by zero']),
        ('--config={}/imports.py', ['imports.py:1: ', 'no_such_module']),
        ('--config={}/unreadable.py', ['/no/such/words: No such file']),
    ],
    '--config=configs/base.py': [
        ('--config.model.experts.n_group=4', ['experts.n_group=4:', 'group', 'not built']),
        ('--config.model.num_layer=3', ['num_layer=3:', '--config.model.num_layers?']),
        ('--config.modle.d_ff=3', ['--config.modle.d_ff=3:', '--config.model.d_ff?']),
        ('--config.capacity=1', ['--config.capacity=1:', 'config.model.routing.capacity?']),
        ('--config.data.zzz=1', ['config.data.zzz=1:', 'batch_size', 'tokenizer']),
        ('--config.model=1', ['--config.model=1:', 'group', '--config.model.']),
        ('--config.model.num_layers=x', ['num_layers=x:', 'must be an integer']),
        ('--config.optimizer.b1=x', ['--config.optimizer.b1=x:', 'must be a number']),
        ('--config.model.use_bias=2', ['use_bias=2:', 'must be true or false']),
        ('--config.model.use_bias true', ['true:', '--config.model.use_bias=']),
        ("'--config.model.windows=(1,'", ['windows=(1,:', "'(256, 0)'"]),
        ('--config.model.num_layers', ['num_layers: missing value', '=VALUE']),
        ('--config=configs/base.py', ['--config=configs/base.py:', 'twice; a run has one config']),
        ('--config model.d_ff=3', ['twice; did you mean --config.model.d_ff=3?']),
        ('--epochs=3', ['--epochs=3: no such flag; did you mean --config.training.num_steps?']),
        ('--output_dir=x', ['did you mean --workdir?']),
        ('--config.layers=3', ['--config.layers=3: no such knob; did you mean', 'num_layers?']),
        ('--config.routing.layers=3', ['did you mean --config.model.routing.layers?']),
        ('--config.model.dim=3', ['--config.model.dim=3:', 'mean --config.model.d_model?']),
        ('--data=x', ['--data=x: no such flag; did you mean --config.data.source?']),
        ('--workdri=x', ['--workdri=x:', '--workdir?']),
        ('--workdir=', ['--workdir=: is empty; must be a path']),
        ('--model.num_layers=3', ['--model.num_layers=3:', '--config.model.num_layers?']),
        ('--zzz', ['--zzz:', '--max_tokens, ', '--workdir']),
        ('--max_tokens=many', ['--max_tokens=many:', 'must be an integer']),
        ('--routing=top', ['--routing=top:', 'top_c, dense']),
        ('stray', ['stray: unexpected after --config=configs/base.py;', 'quoted', '--help']),
        ('-', ['-: unexpected', '--help']),
        ('--noconfig.model.use_bias stray', ['stray: unexpected']),
        ('--workdir', ['--workdir: missing value; write --workdir=VALUE']),
        ('--workdir --act=status', ['--workdir: missing value; write --workdir=VALUE']),
        ('--config.seed --workdir=x', ['--config.seed: missing value; write --config.seed=VALUE']),
        ('--workdir = x', ['--workdir = x: has a space next to "="; write --workdir=x']),
        ('--workdir= x', ['--workdir= x: has a space next to "="; write --workdir=x']),
        ('--workdir =x', ['--workdir =x: has a space next to "="; write --workdir=x']),
        ("--workdir = 'a b'", ["write --workdir='a b'"]),
        ('--workdir =', ['--workdir =: has a space next to "="; write --workdir=VALUE']),
        ('--config.seed = 1', ['--config.seed = 1: has a space', 'write --config.seed=1']),
        ('--config.model.use_bias = true', ['write --config.model.use_bias=true']),
        ('--act=def main', ['main: unexpected after --act=def; an option starts', 'quoted']),
        ('--act=1e9, 2e9', ['--act=1e9, 2e9: has a space inside; write --act=1e9,2e9']),
        ('--act=size=1 steps=2', ['has a space inside; write --act=size=1,steps=2']),
        ('workdir=x', ['workdir=x: unexpected; did you mean --workdir=x?']),
        ('model.d_ff=x', ['model.d_ff=x: unexpected; did you mean --config.model.d_ff=x?']),
        ('—workdir=x', ['unexpected; did you mean --workdir=x?']),
        ('--flagfile=/no/such/flags', ['/no/such/flags']),
        ("'--act=bad value'", ['model.num_layers=0: must be 1 or more']),
        ("'--act=no file'", ['/no/such/file: No such file']),
        ('--act=forbidden', ['/locked/file: Permission denied']),
        ('--print_config --config.seed=-1', ['seed=-1:', 'must lie in [0, 2**32)']),
    ],
}


def snapshot(folder: pathlib.Path) -> dict:
    """Every path below, with its bytes and the time of its last change, except a cache."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob('*')]
        if not path.is_relative_to(folder / 'cache')
    }


EXPORTED = {  # what a bad config.json of a folder that was exported from here holds
    'none': {},
    'typed': {'knobs': {'num_layers': 'two'}},
    'grouped': {'knobs': {'routing': 3}},
    'unknown': {'knobs': {'routing': {'unheard_of': 3}}},
    'wide': {'knobs': {'d_model': 64}},
}


def make_folder(folder, tiny_config):
    """Texts, runs and checkpoints that the command lines name; most are bad in one way."""
    for name in ('nothing', 'other', 'study'):
        (folder / name).mkdir()
    texts = write_words(folder / 'text')
    (folder / 'text' / 'empty1.txt').touch()
    (folder / 'text' / 'short.txt').write_text('too short')
    (folder / 'text' / 'bad.parquet').write_bytes(b'PAR1 and then nothing of the kind')
    (folder / 'other' / 'short.txt').write_text('short')
    (folder / 'other' / 'empty.py').touch()
    (folder / 'other' / 'latin.md').write_bytes(b'caf\xe9')
    (folder / 'other' / 'utf-16').write_text('text', encoding='utf-16')
    os.mkfifo(folder / 'other' / 'pipe')
    rows = [json.dumps({'body': 'to be or not ' * 5}) + '\n' for _ in range(4)]
    (folder / 'many.jsonl').write_text(json.dumps({f'field{i}': '' for i in range(20)}))
    (folder / 'other' / 'windows.jsonl').write_text(''.join(rows))
    (folder / 'page.md').write_text('# mine\n')
    (folder / 'nested').mkdir()
    (folder / 'nested' / 'config.json').write_text('{"model_type":' * 10**5)
    prepare(folder / 'store', [(name, b'to be') for name in 'abcd'], ByteTokenizer(), 0.5)
    (folder / 'store' / 'train.bin').write_bytes(bytes(12))
    shutil.copy(ROOT / 'results/cpu/study/study.json', folder / 'study')
    _make_runs(folder, tiny_config)
    _make_hugging_face(folder, texts)


def _make_runs(folder, tiny_config):
    """`taken`, `dense`: runs that have begun; `run`: a routed one with a checkpoint."""
    open_workdir(folder / 'taken', dataclasses.asdict(from_config(tiny.get_config())))
    shutil.copytree(folder / 'taken', folder / 'a run')
    open_workdir(folder / 'dense', dataclasses.asdict(from_config(tiny_config())))
    (folder / 'taken' / 'metrics.jsonl').write_text('{"step": 1, "loss": 5.5}\n')
    changes = {
        'model.num_layers': 1,
        'model.routing.router': 'learned',
        'model.routing.layers': '0',
        'data.source': str(folder / 'text' / '?.txt'),
        'data.held_out_fraction': 0.3,
    }
    save_run(folder / 'run', from_config(tiny_config(**changes)))
    (folder / 'run' / 'checkpoints' / '9').mkdir()  # is skipped; no note may precede an error


def _make_hugging_face(folder, texts):
    """`hf`: a checkpoint; `small`: one with too few ids; `exported`: those of EXPORTED."""
    for name, content in EXPORTED.items():
        (folder / 'exported' / name).mkdir(parents=True)
        config = {'model_type': 'moddepth', 'max_position_embeddings': 32} | content
        (folder / 'exported' / name / 'config.json').write_text(json.dumps(config))
    shutil.copytree(ROOT / 'tests/conversion/golden/olmo2', folder / 'hf')
    train_bpe(iter(texts), 262).save(folder / 'tokenizer')
    shutil.copy(folder / 'tokenizer' / 'tokenizer.json', folder / 'hf')
    shutil.copytree(folder / 'hf', folder / 'small')
    config = json.loads((folder / 'small' / 'config.json').read_text()) | {'vocab_size': 250}
    (folder / 'small' / 'config.json').write_text(json.dumps(config))
