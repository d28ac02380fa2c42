"""The configuration of a model that was trained with moddepth-jax, for transformers."""

from transformers import PretrainedConfig


class ModDepthConfig(PretrainedConfig):
    """What `ModDepthForCausalLM` needs to know, all of it from config.json.

    Args:
      knobs: nested dict, the knobs of `model` in the config of the run.
      blocks: a dict for each block that has parameters: `window` (0: none), `slots` that it writes,
        and whether it is `routed`, has `experts`, `mixes` values and `embeds` values.
      block_order: the index in `blocks` of each block that runs; looped ones come again.
      causal_rule: what selects the tokens of routed blocks, or of experts that choose tokens.
      max_selected: the most tokens of a row that a routed block selects, the first ones.
      averages: shapes by name of what the run keeps in addition to its parameters: thresholds.
      document_separator: id of the token that begins a document, whose tokens see no earlier ones;
        None: rows are one document.
      others: fields that every configuration has.
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
