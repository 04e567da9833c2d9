//! Converts the facts about a host into checks. This module does no I/O.

mod clients;
mod driver;
mod engine;
mod mps;
mod partitions;
mod system;

use super::check::Check;
use super::facts::HostFacts;
use super::requirements::Requirements;

/// Returns all checks. Each check comes before the checks that depend on it.
pub(super) fn judge(facts: &HostFacts, need: &Requirements) -> Vec<Check> {
    let HostFacts { driver, mps, system, engine, partitions } = facts;
    [
        if_needed(need.gpu(), driver::checks(driver, engine, need)),
        if_needed(need.mps, mps::checks(mps, driver, system)),
        clients::checks(&need.clients, driver),
        if_needed(need.mps, partitions::checks(partitions.as_deref(), driver)),
        if_needed(need.gpu(), system::of_gpus(system)),
        if_needed(need.mps, system::of_mps(system)),
        system::checks(system, need),
        if_needed(need.gpu() || need.onnxruntime, engine::answer(engine)),
        if_needed(need.onnxruntime, engine::library(engine)),
        if_needed(need.cuda, engine::cuda(engine, driver)),
        if_needed(need.tensorrt, engine::tensorrt(engine)),
        vec![system::emulated(system)],
    ]
    .concat()
}

fn if_needed(needed: bool, checks: Vec<Check>) -> Vec<Check> {
    if needed { checks } else { checks.into_iter().map(Check::not_needed).collect() }
}
