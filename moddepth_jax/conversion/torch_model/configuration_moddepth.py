"""The configuration of a model that was trained with moddepth-jax, for transformers."""

from transformers import PretrainedConfig


class ModDepthConfig(PretrainedConfig):
    """The configuration of `ModDepthForCausalLM`, as in config.json.

    Args:
      knobs: nested dict, the knobs of `model` in the config of the run.
      blocks: a dict for each block that has parameters: `window` (0: none), `slots` that it writes,
        and whether it is `routed`, has `experts`, `mixes` values and `embeds` values.
      block_order: the index in `blocks` of each block that runs; looped blocks are repeated.
      causal_rule: rule that selects the tokens of routed blocks, or of experts that choose tokens.
      max_selected: largest number of tokens of a row that a routed block selects; the first count.
      averages: {name: shape} of the thresholds that the run keeps in addition to its parameters.
      document_separator: id of the token that begins a document, whose tokens do not see earlier
        documents; None: a row is one document.
      others: fields of every configuration.
    """

    model_type = 'moddepth'

    def __init__(
        self,
        knobs=None,
        blocks=(),
        block_order=(),
        causal_rule='dense',
        max_selected=0,
        averages=None,
        document_separator=None,
        **others,
    ):
        self.knobs = knobs or {}
        self.blocks = list(blocks)
        self.block_order = list(block_order)
        self.causal_rule = causal_rule
        self.max_selected = max_selected
        self.averages = averages or {}
        self.document_separator = document_separator
        super().__init__(**others)
