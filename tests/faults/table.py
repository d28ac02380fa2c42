"""What an adversary does to the files, moments and surroundings of a run, and what must follow.

TABLE is {kind: {(command, path): {attack: expected}}}, in the folder that table_test.py makes; an
attack as tests/faults/attacks.py has it. Expected:

bit-equal: status 0, and all that the command makes is as without the attack.
noted: WORDS: status 0 and a line with these words (a regular expression); training ends bit-equal.
refused: WORDS: status 2, one line on stderr with these words, nothing else written.
ends STATUS: WORDS: with these words, and the same command, started again, ends bit-equal.
"""

TRAIN = 'train --config=config.py --workdir=begun'
NEW = 'train --config=config.py --workdir=new'
STORED = 'train --config=stored.py --workdir=new_stored'
GENERATE = 'generate --workdir=run --prompt=to --max_tokens=4'
STUDY = (
    'isoflop --config=configs/study.py --workdir=study --budgets=1e8 --sizes=1x64 --variants=dense '
    '--config.data.source=text/*.txt --config.data.sequence_length=32 --config.data.batch_size=4 '
    '--config.evaluation.final_batches=2 --config.report.sample_tokens=8'
)
EVALUATE = 'evaluate --workdir=run --num_batches=1'

_NO_REGULAR_FILE = {
    'a directory': 'refused',
    'a FIFO': 'refused',
    'a socket': 'refused',
    '/dev/zero': 'refused',
    'a link to itself': 'refused',
    'a broken link': 'refused',
    'unreadable': 'refused: Permission denied',
    '10 GB': 'refused',
}
_NO_JSON = {
    'emptied': 'refused',
    'cut': 'refused',
    'zeros': 'refused',
    'in UTF-16': 'refused',
    'nested': 'refused',
    'a long number': 'refused',
    'a list': 'refused',
    'null': 'refused',
}
_NAMES = (
    'run[1]', 'a\\b', 'a?b', 'a*b', '{a,b}', 'a\nb', 'a b', ' ', '-', '~', '$HOME', '%s', '#', 'a:b',
    'a=b', 'a,b', 'é', '模型', '\U0001f600', "it's", '"', '.hidden', 'x' * 255, '[', 'config.json',
    'checkpoints', '\udcff', '\x1b[31m', 'gs:', '0', 'None',
)  # fmt: skip

TABLE = {
    'config of a run': {
        (GENERATE, 'run/config.json'): _NO_REGULAR_FILE
        | _NO_JSON
        | {
            'deleted': 'refused: config.json',
            'with a BOM': 'refused: config.json',
            'from the future': 'bit-equal',
            'schema_version="1"': 'refused: schema_version',
            'config=[]': 'refused: config.json',
            'config.model=[]': 'refused: config.json',
            'config.model=deleted': 'refused: config.json',
            'config.model.routing=null': 'refused: config.json',
            'config.model.num_layers="1"': 'refused: num_layers',
            'config.model.num_layers=1.5': 'refused: num_layers',
            'config.model.num_layers=true': 'refused: num_layers',
            'config.model.num_layers=-1': 'refused: num_layers',
            'config.model.num_layers=NaN': 'refused: num_layers',
            'config.model.num_layers=2': 'refused',
            'config.model.d_model=1e400': 'refused: d_model',
            'config.model.vocab_size=10': 'refused',
            'config.model.rope_base=Infinity': 'refused',
            'config.model.windows={"a": 1}': 'refused: windows',
            'config.data.source=7': 'refused: source',
            'config.data.tokenizer="gone"': 'refused: gone',
            'config.seed=4294967296': 'refused: seed',
            'config.optimizer.b1=[0.9]': 'refused: b1',
        },
        (TRAIN, 'begun/config.json'): {
            'emptied': 'refused: config.json',
            'deleted': 'refused: config.json',
            'a directory': 'refused: config.json',
            'a FIFO': 'refused: config.json',
            'nested': 'refused: config.json',
            'config.model.d_ff=128': 'refused: d_ff is 128',
        },
        (TRAIN, 'begun/config.py'): {
            'emptied': 'bit-equal',
            'deleted': 'bit-equal',
            'a directory': 'refused: config.py',
            'a FIFO': 'refused: config.py',
            'in UTF-16': 'refused: config.py',
        },
        (TRAIN, 'config.py'): _NO_REGULAR_FILE
        | {
            'emptied': 'refused: config.py.*get_config',
            'cut': 'refused: config.py',
            'deleted': 'refused: config.py',
            'zeros': 'refused: config.py',
            'in UTF-16': 'refused: config.py',
            'in Latin-1': 'refused: config.py',
            'with NUL': 'refused: config.py',
            'nested': 'refused: config.py',
            'with a BOM': 'bit-equal',
            'with CRLF': 'bit-equal',
            'from the future': 'bit-equal',
        },
    },
    'metrics': {
        (TRAIN, 'begun/metrics.jsonl'): {
            'emptied': 'noted: metrics.jsonl',
            'deleted': 'noted: metrics.jsonl',
            'cut': 'noted: metrics.jsonl',
            'half a line more': 'bit-equal',
            'a digit changed': 'noted: metrics.jsonl',
            'without a line': 'noted: metrics.jsonl',
            'a line twice': 'noted: metrics.jsonl',
            'lines swapped': 'noted: metrics.jsonl',
            'an infinite line': 'refused: metrics.jsonl',
            'a nested line': 'refused: metrics.jsonl',
            'zeros': 'refused: metrics.jsonl',
            'in UTF-16': 'refused: metrics.jsonl',
            'from the future': 'bit-equal',
            **_NO_REGULAR_FILE,
        },
        ('compare run --out=compared', 'run/metrics.jsonl'): {
            'emptied': 'refused: metrics.jsonl',
            'deleted': 'refused: metrics.jsonl',
            'nested': 'refused: metrics.jsonl',
            'an infinite line': 'refused: metrics.jsonl',
            'a FIFO': 'refused: metrics.jsonl',
            'a directory': 'refused: metrics.jsonl',
        },
    },
    'checkpoints': {
        (TRAIN, 'begun/checkpoints'): {
            'deleted': 'bit-equal',
            'a file': 'refused: checkpoints',
            'a FIFO': 'refused: checkpoints',
            'a link to itself': 'refused: checkpoints',
            'unreadable': 'refused: checkpoints',
            'read-only': 'refused: checkpoints',
            'a file inside': 'bit-equal',
            'a FIFO inside': 'bit-equal',
            'a loop inside': 'bit-equal',
            'an empty 99 inside': 'noted: checkpoint 99 skipped',
            'a half-written save inside': 'bit-equal',
        },
        (TRAIN, 'begun/checkpoints/5'): {
            'deleted': 'noted: resuming after step 4',
            'a file': 'noted: checkpoint 5 skipped',
            'a FIFO': 'noted: checkpoint 5 skipped',
            'a link to itself': 'noted: checkpoint 5 skipped',
            'a file inside': 'noted: resuming after step',
            'a FIFO inside': 'noted: resuming after step',
            'a loop inside': 'noted: resuming after step',
            'unreadable': 'noted: checkpoint 5 skipped',
        },
        (TRAIN, 'begun/checkpoints/5/manifest.json'): {
            name: 'noted: checkpoint 5 skipped'
            for name in (*_NO_REGULAR_FILE, *_NO_JSON, 'deleted', 'a bit flipped')
        },
        (TRAIN, 'begun/checkpoints/5/_METADATA'): {
            name: 'noted: checkpoint 5 skipped'
            for name in (*_NO_REGULAR_FILE, 'nested', 'deleted', 'longer', 'a bit flipped')
        },
        (GENERATE, 'run/checkpoints'): {
            'deleted': 'refused: no finished checkpoint',
            'a file': 'refused: checkpoints',
            'a link to itself': 'refused: checkpoint',
        },
        (GENERATE, 'run/checkpoints/8/manifest.json'): {
            'deleted': 'noted: checkpoint 8 skipped',
            'nested': 'noted: checkpoint 8 skipped',
            'a FIFO': 'noted: checkpoint 8 skipped',
        },
    },
    'other files of a run': {
        (TRAIN, 'begun/lock'): {
            'emptied': 'bit-equal',
            'deleted': 'bit-equal',
            'random bytes': 'bit-equal',
            '10 GB': 'bit-equal',
            'a directory': 'refused: begun',
            'a FIFO': 'refused: begun',
            '/dev/zero': 'refused: begun',
            'a link to itself': 'refused: begun',
            'unreadable': 'refused: begun',
            'held': 'refused: begun: in use by',
        },
        (TRAIN, 'begun/tensorboard'): {
            'deleted': 'bit-equal',
            'a file': 'noted: TensorBoard',
            'a link to itself': 'noted: TensorBoard',
            'read-only': 'noted: TensorBoard',
        },
        (TRAIN, 'begun'): {
            'a file': 'refused: begun: is a file',
            'a FIFO': 'refused: begun: is a file',
            'a link to itself': 'refused: begun',
            'unreadable': 'refused: begun',
            'read-only': 'refused: begun',
            'a file inside': 'bit-equal',
            'a loop inside': 'bit-equal',
        },
        ('train --config=config.py --workdir=run', 'run/summary.json'): {
            'emptied': 'bit-equal',
            'a directory': 'refused: summary.json',
        },
        ('train --config=config.py --workdir=run', 'run/sample.txt'): {
            'a directory': 'refused: sample.txt',
        },
        ('compare run --out=compared', 'run/summary.json'): _NO_REGULAR_FILE
        | _NO_JSON
        | {
            'eval=[]': 'refused: summary.json',
            'eval.loss="low"': 'refused: summary.json',
            'eval.loss=NaN': 'refused: summary.json',
            'total_flops=null': 'refused: summary.json',
            'parameters={}': 'refused: summary.json',
        },
    },
    'prepared text': {
        (STORED, 'store/prepared.json'): _NO_REGULAR_FILE
        | _NO_JSON
        | {
            'deleted': 'refused: prepared',
            'dtype="uint32"': 'refused: store',
            'dtype="float16"': 'refused: dtype',
            'dtype=["uint16"]': 'refused: dtype',
            'dtype="object"': 'refused: dtype',
            'train=null': 'refused: train',
            'train.tokens=null': 'refused: tokens',
            'train.tokens=[]': 'refused: tokens',
            'train.tokens=-2': 'refused: tokens',
            'train.tokens=1e999': 'refused: tokens',
            'train.bytes=0': 'refused: bytes',
            'train.bytes=7': 'refused: prepared.json',
            'train.documents="many"': 'refused: documents',
            'train.sha256="00"': 'refused: store',
            'fingerprint="0000"': 'refused: fingerprint',
            'fingerprint=[]': 'refused: fingerprint',
            'tokenizer.separator=0': 'refused: separator|prepared.json',
            'tokenizer.vocab_size=-1': 'refused: prepared.json',
            'tokenizer=[]': 'refused: prepared.json',
            'held_out_fraction="half"': 'refused: held_out_fraction',
            'schema_version=99': 'refused: schema_version=99',
            'inputs=deleted': 'refused: inputs',
        },
        **{
            (STORED, f'store/{name}'): {
                'emptied': f'refused: {name}',
                'deleted': f'refused: {name}',
                'cut': f'refused: {name}',
                'longer': f'refused: {name}',
                'a bit flipped': f'refused: {name}',
                'zeros': f'refused: {name}',
                'reversed': f'refused: {name}',
                'a directory': f'refused: {name}',
                'a FIFO': f'refused: {name}',
                '/dev/zero': f'refused: {name}',
                'a link to itself': f'refused: {name}',
                'unreadable': f'refused: {name}',
                '10 GB': f'refused: {name}',
                'from the future': 'bit-equal',
            }
            for name in ('train.bin', 'train.index', 'held_out.bin')
        },
        (STORED, 'store/tokenizer/tokenizer.json'): _NO_REGULAR_FILE
        | _NO_JSON
        | {'deleted': 'refused: tokenizer', 'model.vocab={}': 'refused: tokenizer'},
        (STORED, 'store'): {
            'a file': 'refused: store',
            'a FIFO': 'refused: store',
            'a link to itself': 'refused: store',
            'unreadable': 'refused: store',
            'read-only': 'bit-equal',
            'a loop inside': 'bit-equal',
        },
    },
    'text': {
        (NEW, 'text/1.txt'): _NO_REGULAR_FILE
        | {
            'deleted': 'noted: .',
            'emptied': 'noted: .',
            'in UTF-16': 'refused: 1.txt',
            'in Latin-1': 'refused: 1.txt',
            'random bytes': 'refused: 1.txt',
            'from the future': 'bit-equal',
        },
        (TRAIN, 'text/1.txt'): {
            'deleted': 'refused: corpus_sha256',
            'emptied': 'refused: corpus_sha256',
            'cut': 'refused: corpus_sha256',
            'a bit flipped': 'refused: corpus_sha256',
            'with CRLF': 'refused: corpus_sha256',
            'from the future': 'bit-equal',
        },
        ('prepare --input=text/*.txt --output=prepared --processes=1', 'text/1.txt'): {
            **_NO_REGULAR_FILE,
            'in UTF-16': 'refused: 1.txt',
            'in Latin-1': 'refused: 1.txt',
            'from the future': 'bit-equal',
        },
        ('prepare --input=text/**/*.txt --output=prepared --processes=1', 'text'): {
            'a loop inside': 'bit-equal',
            'a FIFO inside': 'bit-equal',
            'unreadable': 'refused: text',
            'a file': 'refused: text',
        },
        ('prepare --input=rows.jsonl --output=prepared --processes=1', 'rows.jsonl'): {
            'nested': 'refused: rows.jsonl, line 1',
            'a long number': 'refused: rows.jsonl, line 1',
            'null': 'refused: rows.jsonl, line 1',
            'zeros': 'refused: rows.jsonl',
            'in UTF-16': 'refused: rows.jsonl',
            'half a line more': 'refused: rows.jsonl, line',
            'with a BOM': 'bit-equal',
            'with CRLF': 'bit-equal',
        },
        ('inspect --workdir=run --text=text/1.txt --out=inspected --max_tokens=32', 'text/1.txt'): {
            **{name: 'refused: 1.txt' for name in _NO_REGULAR_FILE},
            'emptied': 'refused: 1.txt',
            'in UTF-16': 'refused: 1.txt',
            'in Latin-1': 'refused: 1.txt',
        },
    },
    'Hugging Face folder': {
        ('convert --from_hf=hf --workdir=new', 'hf/config.json'): _NO_REGULAR_FILE
        | _NO_JSON
        | {
            'deleted': 'refused: config.json',
            'model_type=7': 'refused: model_type',
            'model_type=["olmo2"]': 'refused: model_type',
            'architectures=7': 'refused: config.json',
            'layer_types=7': 'refused: layer_types',
            'layer_types=[["full_attention"]]': 'refused: layer_types',
            'rope_scaling=[]': 'refused: rope_scaling',
            'rope_scaling={"rope_type": ["a"]}': 'refused: rope_type',
            'hidden_size="16"': 'refused: hidden_size',
            'hidden_size=1e30': 'refused: hidden_size',
            'num_hidden_layers=null': 'refused: num_hidden_layers',
            'num_attention_heads=0': 'refused: num_attention_heads',
            'rms_norm_eps=[]': 'refused: rms_norm_eps',
            'tie_word_embeddings="no"': 'refused: tie_word_embeddings',
        },
        ('convert --from_hf=hf --workdir=new', 'hf/model.safetensors'): _NO_REGULAR_FILE
        | {
            'emptied': 'refused: model.safetensors',
            'deleted': 'refused: safetensors',
            'cut': 'refused: model.safetensors',
            'longer': 'refused: model.safetensors',
            'zeros': 'refused: model.safetensors',
            'random bytes': 'refused: model.safetensors',
        },
        ('convert --from_hf=hf --workdir=new', 'hf/tokenizer.json'): _NO_REGULAR_FILE
        | _NO_JSON
        | {'model=null': 'refused: tokenizer.json', 'model.vocab=[]': 'refused: tokenizer.json'},
        ('convert --from_hf=sharded --workdir=new', 'sharded/model.safetensors.index.json'): {
            **_NO_REGULAR_FILE,
            **_NO_JSON,
            'weight_map=[]': 'refused: weight_map',
            'weight_map={}': 'refused',
            'weight_map.W=""': 'refused',
            'weight_map.W="."': 'refused',
            'weight_map.W=".."': 'refused',
            'weight_map.W="../text/0.txt"': 'refused',
            'weight_map.W="/dev/zero"': 'refused',
            'weight_map.W=7': 'refused',
        },
    },
    'study': {
        (STUDY, f): {
            name: f'refused: {f.rpartition("/")[2]}'
            for name in ('emptied', 'cut', 'a list', 'nested', 'a directory', 'a FIFO')
        }
        for f in ('study/plan.json', 'study/runs/dense-1x64-1e08-lr0.003-seed0/summary.json', 'study/runs/NAME/config.json')
    },
    'names of directories': {
        (TRAIN, 'begun'): {f'named {name!r}': 'bit-equal' for name in _NAMES},
        (NEW, 'text'): {f'named {name!r}': 'bit-equal' for name in ('run[1]', 'a?b', 'a\nb', 'é')},
        (STORED, 'store'): {f'named {name!r}': 'bit-equal' for name in ('run[1]', 'a?b', 'a\nb')},
        ('convert --from_hf=hf --workdir=new', 'hf'): {
            f'named {name!r}': 'bit-equal' for name in ('run[1]', 'a\\b', 'é')
        },
    },
    'moments': {
        (TRAIN, 'begun/config.json'): {
            'step 6: deleted': 'bit-equal',
        },
        (TRAIN, 'begun/metrics.jsonl'): {
            'step 6: deleted': 'noted: metrics.jsonl',
            'step 6: emptied': 'noted: metrics.jsonl',
            'last evaluation: a directory': 'refused: metrics.jsonl',
        },
        (TRAIN, 'begun/checkpoints'): {
            'step 6: deleted': 'bit-equal',
            'save: deleted': 'ends 2: checkpoint',
            'step 7: read-only': 'ends 2: Permission denied',
            'report: deleted': 'bit-equal',
        },
        (TRAIN, 'begun'): {
            'step 6: deleted': 'refused: begun',
            'report: deleted': 'refused: begun',
        },
        (TRAIN, 'begun/lock'): {'step 6: deleted': 'bit-equal'},
        (TRAIN, 'text/1.txt'): {'step 6: deleted': 'bit-equal', 'step 6: emptied': 'bit-equal'},
        (STORED, 'store/train.bin'): {'step 6: deleted': 'bit-equal'},
        (TRAIN, None): {
            f'{moment}: {sent}': expected
            for sent, expected in {
                'SIGINT': 'ends 130: SIGINT: stopped and saved',
                'SIGTERM': 'ends 143: SIGTERM: stopped and saved',
                'SIGUSR1': 'ends 138: SIGUSR1: stopped and saved',
                'SIGTERM and SIGINT': 'ends 143: SIGTERM: stopped and saved',
                'SIGINT twice': 'ends 130: interrupted',
                'SIGHUP': 'ends -1: ',
                'SIGKILL': 'ends -9: ',
                'SIGSTOP and SIGCONT': 'bit-equal',
                'SIGWINCH': 'bit-equal',
            }.items()
            for moment in ('step 6', 'save')
        }
        | {
            'restore: SIGINT': 'ends 130: interrupted',
            'compiling: SIGTERM': 'ends 143: SIGTERM: stopped and saved',
            'last evaluation: SIGINT': 'ends 130: interrupted',
            'summary: SIGTERM': 'ends -15: ',
            'report: SIGINT': 'ends 130: interrupted',
            'report: SIGTERM': 'ends -15: ',
            'step 6: time 1970': 'bit-equal',
            'step 6: time 2100': 'bit-equal',
        },
    },
    'surroundings': {
        (command, None): {
            'HOME=/nonexistent': 'bit-equal',
            'HOME=': 'bit-equal',
            'TMPDIR=/nonexistent': 'bit-equal',
            'LC_ALL=C': 'bit-equal',
            'LC_ALL=tr_TR.UTF-8': 'bit-equal',
            'PYTHONUTF8=0': 'bit-equal',
            'PYTHONIOENCODING=ascii': 'bit-equal',
            'PYTHONHASHSEED=7': 'bit-equal',
            'PYTHONOPTIMIZE=2': 'bit-equal',
            'PYTHONDEVMODE=1': 'bit-equal',
            'TZ=Pacific/Kiritimati': 'bit-equal',
            'COLUMNS=1': 'bit-equal',
            'TERM=dumb': 'bit-equal',
            'XDG_CACHE_HOME=config.py': 'bit-equal',
            'XDG_CACHE_HOME=/dev/null': 'bit-equal',
            'XDG_CACHE_HOME=/proc/none': 'bit-equal',
            'MPLCONFIGDIR=/nonexistent': 'bit-equal',
            'JAX_PLATFORMS=gpuu': 'refused: gpuu',
            'closed stdin': 'bit-equal',
            'closed stdout': 'bit-equal',
            'closed stderr': 'bit-equal',
            'unread stdout': 'ends 141: ',
            'full stdout': 'refused: No space left',
            'ulimit -n 40': 'bit-equal',
            'nice 19': 'bit-equal',
            'umask 777': 'refused: Permission denied',
            'working directory deleted': 'refused',
        }
        for command in (TRAIN, GENERATE)
    }
    | {
        (command, None): {'ulimit -f 1': 'refused: File too large'}
        for command in (
            'prepare --input=text/*.txt --output=prepared --processes=1',
            'convert --from_hf=hf --workdir=new',
            'inspect --workdir=run --text=text/1.txt --out=inspected --max_tokens=32',
            'compare run --out=compared',
            'evaluate --workdir=run --num_batches=1 --json=a.json',
        )
    },
    'compiled programs': {
        (TRAIN, 'cache'): {
            'every file emptied': 'bit-equal',
            'every file cut': 'bit-equal',
            'every file random bytes': 'bit-equal',
            'every file a directory': 'bit-equal',
            'every file zeros': 'bit-equal',
            'every file unreadable': 'bit-equal',
            'read-only': 'bit-equal',
            'unreadable': 'bit-equal',
            'a file': 'bit-equal',
            'a link to itself': 'bit-equal',
        },
    },
}
