//! The memory of a simulated GPU. The profile of a model states the memory of its workers.

use std::collections::BTreeMap;

use shadowslice_shared::profile::ProcessMemory;

use crate::world::model::WorldModel;

/// The memory that is free if nothing limits it, in bytes. It is larger than that of any GPU.
const UNLIMITED: i128 = 1 << 60;

/// Returns the part of the limit that the workers of these models do not use, in bytes. It is negative
/// if the workers use more.
pub(super) fn free<'m, 'a: 'm>(limit: Option<u64>, models: impl Iterator<Item = &'m WorldModel<'a>>) -> i128 {
    limit.map_or(UNLIMITED, |limit| i128::from(limit) - used(models))
}

/// Returns the memory that the workers of these models use. Workers of one process share a context.
fn used<'m, 'a: 'm>(models: impl Iterator<Item = &'m WorldModel<'a>>) -> i128 {
    let mut shared_contexts = BTreeMap::new();
    let mut used = 0;
    for model in models {
        let ProcessMemory { context, weights, activations } = model.spec.truth.memory;
        // Both workers of a model use the same weights.
        let workers = if model.has_second_worker() { 2 } else { 1 };
        used += workers * i128::from(activations);
        if model.weights.are_on_gpu() {
            used += i128::from(weights);
        }
        match model.spec.shared_process {
            Some(process) => drop(shared_contexts.insert(process, i128::from(context))),
            None => used += workers * i128::from(context),
        }
    }
    used + shared_contexts.into_values().sum::<i128>()
}
