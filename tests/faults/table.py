"""Attacks on the files, moments and environment of a run, and the required results.

TABLE is {kind: {(command, path): {expected: attacks}}}, in the folder of World in table_test.py.
Attacks, separated by `; `, are those of tests/faults/attacks.py. Expected:

bit-equal: status 0, and all outputs are the same as without the attack.
noted: WORDS: status 0 and a line with these words (a regular expression); training ends bit-equal.
refused: WORDS: status 2, one line on stderr with these words or the file's name, no changed file.
ends STATUS: WORDS: with these words, and the same command, started again, ends bit-equal.
"""

BEGUN = 'train --config=config.py --workdir=begun'  # resumes after step 5
DONE = 'train --config=config.py --workdir=run'
NEW = 'train --config=config.py --workdir=new'
STORED = 'train --config=stored.py --workdir=new'
GENERATE = 'generate --workdir=run --prompt=to --max_tokens=4'
EVALUATE = 'evaluate --workdir=run --num_batches=1 --json=a.json'
INSPECT = 'inspect --workdir=run --text=text/1.txt --out=inspected --max_tokens=32'
COMPARE = 'compare run --out=compared'
PREPARE = 'prepare --input=text/**/*.txt --output=prepared --processes=1'
ROWS = 'prepare --input=rows.jsonl --output=prepared --processes=1'
CONVERT = 'convert --from_hf=hf --workdir=new'
SHARDED = 'convert --from_hf=sharded --workdir=new'
STUDY = (
    'isoflop --config=configs/study.py --workdir=study --budgets=1e8 --sizes=1x64 --variants=dense '
    '--config.data.source=text/*.txt --config.data.sequence_length=32 --config.data.batch_size=4 '
    '--config.evaluation.final_batches=2 --config.report.sample_tokens=8'
)
RUN_OF_STUDY = 'study/runs/dense-1x64-1e08-lr0.003-seed0'

IRREGULAR = 'a FIFO; /dev/zero; a link to itself; unreadable'
NO_FILE = f'{IRREGULAR}; a directory; 10 GB'
NO_JSON = 'cut; in UTF-16; nested; a list'
OTHERS = 'a FIFO; a directory; cut; a list'  # for a file that is read as others are
BAD_SPLIT = 'a FIFO; a directory; 10 GB; deleted; cut; longer; a bit flipped; zeros'
NAMES = 'run[1]; a\\b; {a,b}; a b; -; $HOME; %s; a:b; \U0001f600; config.json; ' + 255 * 'x'

TABLE = {
    'the config of a run': {
        (GENERATE, 'run/config.json'): {
            'refused': f'{NO_FILE}; {NO_JSON}; deleted; with a BOM; schema_version="1"; config=[]; '
            'config.model=deleted; config.model.routing=null; config.model.num_layers="1"; '
            'config.model.num_layers=1.5; config.model.num_layers=true; '
            'config.model.num_layers=NaN; config.seed=4294967296; config.model.d_model=1e400; '
            'config.data.source=7; config.model.windows={"a":1}; config.optimizer.b1=[0.9]',
            'refused: tokenizer.*gone': 'config.data.tokenizer="gone"',
            'refused: num_layers|checkpoint': 'config.model.num_layers=2',
            'refused: checkpoint 8': 'config.model.vocab_size=10',
        },
        (BEGUN, 'begun/config.json'): {'refused': 'deleted; nested; config.model.d_ff=128'},
        (BEGUN, 'begun/config.py'): {
            'bit-equal': 'deleted; in UTF-16; a FIFO; /dev/zero',
            'refused': 'a directory; unreadable',
        },
        (BEGUN, 'config.py'): {
            'refused': f'{NO_FILE}; emptied; in UTF-16; with NUL; nested',
            'bit-equal': 'with a BOM; with CRLF',
        },
    },
    'metrics and summary': {
        (BEGUN, 'begun/metrics.jsonl'): {
            'noted: metrics.jsonl: ': 'emptied; deleted; cut; a digit changed; without a line; '
            'lines swapped; an infinite line; a nested line; in UTF-16; a FIFO; a broken link',
            'bit-equal': 'half a line more',
            'refused': 'a directory; unreadable; 10 GB',
        },
        (COMPARE, 'run/metrics.jsonl'): {'refused': 'deleted; a nested line; an infinite line'},
        (COMPARE, 'run/summary.json'): {
            'refused': f'{OTHERS}; 10 GB; nested; eval=[]; eval.loss="low"; total_flops=null; '
            'parameters={}',
        },
        (DONE, 'run/summary.json'): {'bit-equal': 'emptied'},
    },
    'checkpoints': {
        (BEGUN, 'begun/checkpoints'): {
            'bit-equal': 'a FIFO inside; a loop inside; a half-written save inside',
            'noted: starts there; kept: .* rows of metrics in metrics.jsonl.before': 'deleted',
            'noted: checkpoint 99 skipped': 'an empty 99 inside',
            'noted: checkpoint 5 skipped': 'every file cut; every file zeros',
            'refused': 'a file; a link to itself; unreadable; read-only',
        },
        (BEGUN, 'begun/checkpoints/5'): {
            'noted: resuming after step 4': 'deleted; a file; a FIFO; a link to itself; unreadable',
            'noted: resuming after step': 'a file inside; a loop inside',
        },
        (BEGUN, 'begun/checkpoints/5/_METADATA'): {
            'noted: checkpoint 5 skipped': f'{NO_FILE}; longer; a bit flipped',
        },
        (GENERATE, 'run/checkpoints'): {'refused: no finished checkpoint': 'deleted; a file'},
        (GENERATE, 'run/checkpoints/8/manifest.json'): {
            'noted: checkpoint 8 skipped': f'{NO_FILE}; {NO_JSON}; deleted; a bit flipped',
        },
    },
    'the directory of a run': {
        (BEGUN, 'begun/lock'): {
            'bit-equal': 'deleted; random bytes; 10 GB',
            'refused: --workdir=begun': 'a directory; a FIFO; a link to itself; unreadable',
        },
        (BEGUN, 'begun'): {
            'refused: --workdir=begun': 'a file; a FIFO; a link to itself',
            'refused: begun.*Permission denied': 'unreadable; read-only',
            'bit-equal': 'a file inside; a loop inside',
        },
    },
    'prepared text': {
        (STORED, 'store/prepared.json'): {
            'refused': f'{NO_FILE}; {NO_JSON}; a socket; a broken link; emptied; zeros; '
            'a long number; null; dtype="uint32"; dtype=["uint16"]; dtype="object"; train=null; '
            'train.tokens=[]; train.tokens=-2; train.tokens=1e999; train.bytes=7; '
            'train.documents="many"; train.sha256="00"; fingerprint="0000"; fingerprint=[]; '
            'tokenizer.separator=1; tokenizer.vocab_size=-1; tokenizer=[]; '
            'held_out_fraction="half"; schema_version=99; inputs=deleted',
            'refused: store': 'deleted',
        },
        (STORED, 'store/train.bin'): {'refused': BAD_SPLIT, 'bit-equal': 'from the future'},
        (STORED, 'store/train.index'): {'refused': BAD_SPLIT},
        (STORED, 'store/held_out.bin'): {'refused': 'a bit flipped; deleted'},
        (STORED, 'store/tokenizer/tokenizer.json'): {
            'refused: tokenizer': f'{OTHERS}; 10 GB; nested; deleted; model.vocab={{}}',
        },
        (STORED, 'store'): {
            'refused': 'a file; a link to itself; unreadable',
            'bit-equal': 'read-only; a loop inside',
        },
    },
    'text': {
        (NEW, 'text/1.txt'): {
            'refused': f'{IRREGULAR}; in UTF-16; random bytes; 10 GB',
        },
        (BEGUN, 'text/1.txt'): {
            'refused: corpus_sha256': 'deleted; emptied; a bit flipped; with CRLF',
            'bit-equal': 'from the future',
        },
        (PREPARE, 'text/1.txt'): {'refused': f'{IRREGULAR}; in Latin-1'},
        (PREPARE, 'text'): {
            'bit-equal': 'a loop inside; a FIFO inside',
            'refused': 'unreadable; a file; a link to itself',
        },
        (ROWS, 'rows.jsonl'): {
            'refused': f'{IRREGULAR}; nested; null; in UTF-16; half a line more',
            'bit-equal': 'with a BOM; with CRLF',
        },
        (INSPECT, 'text/1.txt'): {
            'refused': 'a FIFO; a directory; emptied; in Latin-1; 10 GB',
        },
    },
    'a Hugging Face folder': {
        (CONVERT, 'hf/config.json'): {
            'refused': f'{NO_FILE}; {NO_JSON}; deleted; model_type=7; model_type=["olmo2"]; '
            'layer_types=7; layer_types=[["full_attention"]]; rope_scaling=[]; hidden_size="16"; '
            'rope_scaling={"rope_type":["a"]}; hidden_size=1e30; num_hidden_layers=null; '
            'num_attention_heads=0; rms_norm_eps=[]; tie_word_embeddings="no"',
        },
        (CONVERT, 'hf/model.safetensors'): {
            'refused': f'{NO_FILE}; emptied; cut; longer; random bytes',
            'refused: safetensors': 'deleted',
        },
        (CONVERT, 'hf/tokenizer.json'): {
            'refused': f'{OTHERS}; a broken link; nested; model=null; model.vocab=[]',
        },
        (SHARDED, 'sharded/model.safetensors.index.json'): {
            'refused': f'{OTHERS}; 10 GB; nested; weight_map=[]; weight_map.W=""; '
            'weight_map.W=".."; weight_map.W="../text/0.txt"; weight_map.W="/dev/zero"; '
            'weight_map.W=7',
            'refused: lacks the tensor': 'weight_map={}',
        },
    },
    'a study': {
        (STUDY, f'{folder}/{file}.json'): {'refused': OTHERS}
        for folder, file in (
            ('study', 'plan'),
            (RUN_OF_STUDY, 'summary'),
            (RUN_OF_STUDY, 'config'),
        )
    },
    'names of directories': {
        (BEGUN, 'begun'): {
            'bit-equal': NAMES,
            'refused: without line ends': 'a\nb; a\x1b[31m; \udcff',
        },
        (NEW, 'text'): {'bit-equal': 'a b; é'},
        (STORED, 'store'): {'bit-equal': 'run[1]; a?b; é'},
        (CONVERT, 'hf'): {'noted: 12,608 parameters': 'run[1]; a\\b; é'},
    },
    'moments': {
        (BEGUN, 'begun/config.json'): {'bit-equal': 'step 6: deleted'},
        (BEGUN, 'begun/lock'): {'bit-equal': 'step 6: deleted'},
        (BEGUN, 'begun/metrics.jsonl'): {
            'noted: metrics.jsonl: was changed': 'step 6: deleted; step 6: emptied',
            'refused': 'last evaluation: a directory',
        },
        (BEGUN, 'begun/checkpoints'): {
            'bit-equal': 'step 6: deleted; report: deleted',
            'ends 2: checkpoint': 'save: deleted',
            'refused: Permission denied': 'step 7: read-only',
        },
        (BEGUN, 'begun'): {'refused': 'step 6: deleted; report: deleted'},
        (BEGUN, 'text/1.txt'): {'bit-equal': 'step 6: deleted; step 6: emptied'},
        (STORED, 'store/train.bin'): {
            'bit-equal': 'step 6: deleted',
            'refused: was changed while': 'step 6: cut; step 6: emptied; step 6: a bit flipped',
        },
        (BEGUN, None): {
            'refused: --workdir=begun: in use by process': 'in use by another run',
            'ends 130: SIGINT: stopped and saved': 'step 6: SIGINT',
            'ends 143: SIGTERM: stopped and saved': 'step 6: SIGTERM; compiling: SIGTERM; '
            'step 6: SIGTERM and SIGINT',
            'ends 138: SIGUSR1: stopped and saved': 'step 6: SIGUSR1',
            'ends 130: interrupted': 'step 6: SIGINT twice; restore: SIGINT; report: SIGINT; '
            'last evaluation: SIGINT; summary: SIGINT',
            'ends -15': 'summary: SIGTERM; report: SIGTERM',
            'ends -1': 'step 6: SIGHUP; save: SIGHUP',
            'ends -9': 'step 6: SIGKILL; save: SIGKILL; summary: SIGKILL; report: SIGKILL',
            'bit-equal': 'step 6: SIGSTOP and SIGCONT; save: SIGSTOP and SIGCONT; '
            'step 6: time 1970; step 6: time 2100',
        },
    },
    'surroundings': {
        (BEGUN, None): {
            'bit-equal': 'HOME=; TMPDIR=/nonexistent; LC_ALL=C; PYTHONUTF8=0; PYTHONHASHSEED=7; '
            'PYTHONIOENCODING=ascii; PYTHONOPTIMIZE=2; COLUMNS=1; MPLCONFIGDIR=/nonexistent; '
            'closed stdin; closed stdout; closed stderr; ulimit -n 64',
            'noted: compilation cache': 'XDG_CACHE_HOME=/dev/null',
            'ends 2: No space left': 'full stdout',
            'refused: config.py': 'working directory deleted',
            'refused: JAX_PLATFORMS=gpuu': 'JAX_PLATFORMS=gpuu',
        },
        (GENERATE, None): {
            'bit-equal': 'HOME=; PYTHONUTF8=0; closed stdin',
            'ends 141: ': 'unread stdout',
            'refused: No space left': 'full stdout',
        },
        (NEW, None): {'ends 2: error: .*File too large': 'ulimit -f 1'},
        **{
            (command, None): {'refused: File too large': 'ulimit -f 1'}
            for command in (PREPARE, CONVERT)
        },
    },
    'compiled programs': {
        (BEGUN, 'cache'): {
            'bit-equal': 'every file cut; every file zeros; every file a directory; '
            'every file unreadable; read-only; unreadable; a file',
        },
    },
}
