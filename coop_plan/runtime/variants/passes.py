"""The passes that add variants to a captured graph, in the order in which they run."""

from coop_plan.runtime.capture.op_variants import VariantPasses
from coop_plan.runtime.variants.bit_masks import add_bit_mask_variants
from coop_plan.runtime.variants.chunked import add_chunked_variants
from coop_plan.runtime.variants.fused_cross_entropy import fuse_cross_entropies
from coop_plan.runtime.variants.inplace_outputs import overwritable_arguments
from coop_plan.runtime.variants.max_pool import add_max_pool_variants
from coop_plan.runtime.variants.output_for_grad import add_output_variants
from coop_plan.runtime.variants.shape_only_backward import use_shape_only_backwards

PASSES_FOR_ANY_SIZES = VariantPasses(
    rewrites=(fuse_cross_entropies,), overwritable_arguments=overwritable_arguments, additions=()
)
"""Those whose results hold at any sizes: other variants were compared with the op at one size."""

VARIANT_PASSES = VariantPasses(
    rewrites=(fuse_cross_entropies, use_shape_only_backwards),
    overwritable_arguments=overwritable_arguments,
    additions=(
        add_bit_mask_variants,
        add_max_pool_variants,
        add_output_variants,
        add_chunked_variants,
    ),
)
