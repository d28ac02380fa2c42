"""A run as a model of lm-evaluation-harness. Needs lm_eval."""

import codecs
import contextlib
import hashlib
import itertools
import json

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from moddepth_jax.data.tokenizers.tokenizer import Tokenizer, TokenStream
from moddepth_jax.hparams import Hparams
from moddepth_jax.hparams.rules import causal_routing, check_causal
from moddepth_jax.inference.generate import generate
from moddepth_jax.inference.scoring import score

_DEFAULT_TOKENS = 256  # if a task gives no number; at most half the context
_GENERATION = {'until', 'max_gen_toks', 'do_sample', 'temperature', 'top_p', 'top_k'}


class _AllStopped(Exception):
    """Every text of a batch has reached one of its stops."""


class HarnessLM(TemplateLM):
    """Answers the harness's requests: loglikelihood, loglikelihood_rolling, generate_until.

    A prompt is one document after a separator; text that spells the separator is plain text. A
    context that is too long loses its left end, with the separator, like windows in training. A
    rolling text is predicted from the separator on, in windows that overlap by one token.

    Args:
      variables: Linen variables of the model.
      hparams: hyper-parameters of the model and its stage.
      tokenizer: tokenizer of the model.
      batch_size: rows in a batch.
      routing: causal rule, by default that of training.
      seed: seed of samples.
      bar: context manager like `cli.progress_bar`.

    Attributes:
      title: title of the bar for the next requests.
      num_cut: number of requests whose context was too long.
    """

    def __init__(
        self,
        variables,
        hparams: Hparams,
        tokenizer: Tokenizer,
        *,
        batch_size: int = 32,
        routing: str | None = None,
        seed: int = 0,
        bar=lambda title, total: contextlib.nullcontext(lambda count: None),
    ):
        super().__init__()
        self.routing = causal_routing(hparams) if routing is None else routing
        check_causal(hparams, self.routing)
        self.max_length, self.batch_size, self.num_cut = hparams.data.sequence_length, batch_size, 0
        self._variables, self._hparams, self._tokens = variables, hparams, tokenizer
        self._seed, self._bar, self.title = seed, bar, 'requests'

    @property
    def eot_token_id(self) -> int:
        """The separator, which the harness also uses as the prefix of an empty context."""
        return self._tokens.separator

    def tok_encode(self, string, add_special_tokens=None, **kwargs) -> list[int]:
        """Encode a text, after the separator unless `add_special_tokens` is False."""
        begin = [] if add_special_tokens is False else [self.eot_token_id]
        return begin + self._tokens.encode(string.encode()).tolist()

    def _encode_pair(self, context, continuation):
        """Split the ids of the text where they cease to be those of the context.

        Spaces at the end of the context belong to the continuation, as in the harness. So does a
        token that spans both, which the harness would leave out, or half of it.
        """
        before = self.tok_encode(context.rstrip())
        whole = self.tok_encode(context + continuation)
        both = zip(before, whole[:-1], strict=False)
        begin = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
        return whole[:begin], whole[begin:]

    def loglikelihood(self, requests, disable_tqdm=True) -> list[tuple[float, bool]]:
        """Return (log-likelihood in nats, whether greedy) of each request's continuation."""
        for i, request in enumerate(requests):
            if not request.args[1]:
                raise ValueError(f'request {i} has an empty continuation')
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests, **kwargs):
        return [one[:2] for one in self._scores([request[1:] for request in requests])]

    def _scores(self, requests):
        with self._bar(self.title, len(requests)) as advance:
            how = {'batch_size': self.batch_size, 'routing': self.routing, 'on_scored': advance}
            scores = score(self._variables, self._hparams, requests, **how)
        self.num_cut += sum(one.cut > 0 for one in scores)
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm=True) -> list[float]:
        """Return the log-likelihood in nats of each text; every token is predicted once."""
        windows = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            rolling = utils.get_rolling_token_windows(ids, self.eot_token_id, self.max_length, 1)
            windows.append(list(map(utils.make_disjoint_window, rolling)))
        scores = iter(self._scores([window for of_text in windows for window in of_text]))
        return [
            sum((one.log_likelihood for one in itertools.islice(scores, len(of_text))), 0.0)
            for of_text in windows
        ]

    def generate_until(self, requests, disable_tqdm=True) -> list[str]:
        """Generate text after each context, up to its first stop or `max_gen_toks` tokens.

        The stop is removed. Contexts with equal settings run together; samples of one context
        differ in their seeds. Raises ValueError for an unknown setting, or if the tokens do not fit
        the model's context.
        """
        batches, seen = {}, {}
        for i, request in enumerate(requests):
            context, settings = request.args
            key = json.dumps(settings, sort_keys=True)
            sample = seen[context, key] = seen.get((context, key), -1) + 1
            batches.setdefault((key, sample), []).append(i)
        texts = [''] * len(requests)
        settings_of = {key: self._settings(json.loads(key)) for key, _ in batches}
        with self._bar(self.title, len(requests)) as advance:
            for (key, sample), indices in batches.items():
                # Prompts of similar length need the least padding.
                indices.sort(key=lambda i: len(requests[i].args[0]), reverse=True)
                for begin in range(0, len(indices), self.batch_size):
                    batch = indices[begin : begin + self.batch_size]
                    contexts = [requests[i].args[0] for i in batch]
                    written = self._write(contexts, sample, **settings_of[key])
                    for i, text in zip(batch, written, strict=True):
                        texts[i] = text
                    advance(len(batch))
        return texts

    def _settings(self, given):
        """Return the arguments of `_write`; raises ValueError for unsupported settings."""
        default = min(_DEFAULT_TOKENS, self.max_length // 2)
        given = {name: value for name, value in given.items() if value is not None}
        if given.get('do_sample') and 'temperature' not in given:
            given = given | {'temperature': 1.0}  # as in transformers; the harness would use 0
        settings = dict(normalize_gen_kwargs(given, default))
        if unknown := sorted(settings.keys() - _GENERATION):
            known = ', '.join(sorted(_GENERATION))
            raise ValueError(f'generation_kwargs {unknown[0]!r}: must be of {known}')
        num_tokens = settings['max_gen_toks']
        if not 1 <= num_tokens < self.max_length:
            right = f'must lie in [1, data.sequence_length={self.max_length}) with the prompt'
            raise ValueError(f'max_gen_toks={num_tokens}: {right}')
        return {
            'stops': [stop.encode() for stop in settings['until'] if stop],
            'num_tokens': num_tokens,
            'temperature': float(settings['temperature'] if settings['do_sample'] else 0),
            'top_p': float(settings.get('top_p', 1.0)),
            'top_k': int(settings.get('top_k', 0)),
        }

    def _write(self, contexts, sample, stops, num_tokens, **how):
        """Generate the texts after contexts, cut at the first of `stops` (bytes)."""
        prompts = [self.tok_encode(context) for context in contexts]
        most = self.max_length - num_tokens
        self.num_cut += sum(len(prompt) > most for prompt in prompts)
        prompts = [prompt[-most:] for prompt in prompts]
        seeds = [self._seed_of(context, sample) for context in contexts]
        streams = [TokenStream(self._tokens, prompt) for prompt in prompts]
        texts, running = [bytearray() for _ in prompts], set(range(len(prompts)))
        # All batches have one size: the last one is filled up with rows that are ignored.
        missing = self.batch_size - len(prompts)

        def on_tokens(token_B, active_B):
            for b in sorted(running):
                seen = len(texts[b])
                if active_B[b]:
                    texts[b] += streams[b].add(int(token_B[b]))
                # A stop that the last token completes begins up to len(stop) - 1 bytes before it.
                ended = any(texts[b].find(s, max(0, seen + 1 - len(s))) >= 0 for s in stops)
                if ended or not active_B[b]:
                    running.remove(b)
            if not running:
                raise _AllStopped

        with contextlib.suppress(_AllStopped):
            generate(
                self._variables,
                self._hparams,
                prompts + prompts[:1] * missing,
                num_tokens,
                seed=seeds + seeds[:1] * missing,
                routing=self.routing,
                tokenizer=self._tokens,
                on_tokens=on_tokens,
                **how,
            )
        texts = (_before_first(stops, bytes(text)) for text in texts)
        # Without an incomplete last character.
        return [codecs.getincrementaldecoder('utf-8')('replace').decode(text) for text in texts]

    def _seed_of(self, context, sample):
        text = f'{self._seed} {sample} {context}'
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], 'big')


def _before_first(stops, text):
    """Return `text` before the first stop in it."""
    ends = [at for at in map(text.find, stops) if at >= 0]
    return text[: min(ends, default=None)]
