//! What a worker proves whose share is a partition inside the process.
//!
//! How a batch fares depends on the number of SMs, and not on which they are: kernels that do not fit, or that reckon with
//! the SMs that there were when they were recorded. So every number of groups is
//! proven before the worker serves, on the first groups; afterwards a partition is in force without further ado.

use std::fs::File;

use shadowslice_shared::boot::{PartitionProof, Partitioned, ProvenPartitions, Refusal, WarmTime};
use shadowslice_shared::groups::{Division, Groups};

use crate::device::Device;
use crate::engine::Engine;
use crate::proof::{self, Trial, Unproven};

/// Proves each number of groups, and makes the partition ready that the worker begins with. The answers of the whole GPU have
/// been proven, with `times`, which are other ones afterwards where all had to be recorded anew.
pub(super) fn prove(
    trial: &mut Trial<'_>,
    (reference, device): (&File, &Device),
    Partitioned { division, groups }: &Partitioned,
    times: &mut Vec<WarmTime>,
) -> Result<ProvenPartitions, Unproven> {
    check(trial, division)?;
    let mut counts = each_count(trial, (reference, device), division, times)?;
    if none_of(&counts, division).is_some()
        && let Engine::OnGpu(engine) = &mut *trial.engine
        && engine.record_apart()?
    {
        // Kernels in clusters of sixteen blocks, which cuBLAS chooses for TF32 now and then, fit on no partition.
        proof::warm(trial, Some(reference))?;
        *times = proof::prove(trial, reference, Groups::WHOLE)?;
        check(trial, division)?;
        counts = each_count(trial, (reference, device), division, times)?;
    }
    match none_of(&counts, division) {
        Some(why) => Err(Refusal::NoPartitions(why).into()),
        None => Ok(ProvenPartitions { counts, ready: begin(trial.engine, *groups) }),
    }
}

/// Whether everything can be moved, and this process finds the groups that others find.
fn check(trial: &Trial<'_>, division: &Division) -> Result<(), Refusal> {
    let Engine::OnGpu(engine) = &*trial.engine else { return Ok(()) };
    let movable = engine.movable(&trial.signature.inputs, trial.warm_up.batched);
    movable.map_err(Refusal::NoPartitions)?;
    if engine.division() == Some(division) {
        return Ok(());
    }
    Err(Refusal::NoPartitions("this process finds other groups of SMs than those before it".to_owned()))
}

/// Why no part of the GPU can be had, if none can.
fn none_of(counts: &[PartitionProof], division: &Division) -> Option<String> {
    let mut parts = counts.iter().filter(|proof| proof.groups < division.count());
    let last = parts.clone().next_back()?.result.clone().err()?;
    parts.all(|proof| proof.result.is_err()).then_some(last)
}

fn each_count(
    trial: &mut Trial<'_>,
    (reference, device): (&File, &Device),
    division: &Division,
    times: &[WarmTime],
) -> Result<Vec<PartitionProof>, Unproven> {
    let prove = |groups| {
        if groups == division.count() {
            let (sms, result) = (division.total(), Ok(times.to_vec()));
            return Ok(PartitionProof { groups, sms, memory: 0, result });
        }
        let part = Groups::first(groups);
        let (memory, result) = try_on(trial, (reference, device), part)?;
        Ok(PartitionProof { groups, sms: division.sms(part), memory, result })
    };
    (1..=division.count()).map(prove).collect()
}

/// Makes as much of a partition ready as the model can have, and says what that is.
fn begin(engine: &mut Engine, groups: Groups) -> Groups {
    if groups == Groups::WHOLE {
        return groups;
    }
    let mut parts = (1..=groups.count()).rev().map(|count| groups.iter().take(count).collect());
    let can_have = |part: &Groups| match engine.prepare(*part).map(|prepared| prepared.result) {
        Some(Err(_)) => {
            engine.forget(*part);
            false
        }
        Some(Ok(())) | None => true,
    };
    parts.find(can_have).unwrap_or(Groups::WHOLE)
}

/// The memory that a partition takes, in bytes, and how every size fares on it; or why the model cannot have it.
fn try_on(
    trial: &mut Trial<'_>,
    (reference, device): (&File, &Device),
    groups: Groups,
) -> Result<(u64, Result<Vec<WarmTime>, String>), Unproven> {
    let free = device.free_memory();
    if let Some(Err(why)) = trial.engine.prepare(groups).map(|prepared| prepared.result) {
        trial.engine.forget(groups);
        return Ok((0, Err(why.to_string())));
    }
    let proven = proof::prove(trial, reference, groups);
    let memory = free.saturating_sub(device.free_memory());
    trial.engine.forget(groups);
    match proven {
        Ok(times) => Ok((memory, Ok(times))),
        // It fails to run, too, where a kernel does not fit.
        Err(Unproven::Refused(refusal)) => Ok((memory, Err(refusal.to_string()))),
        Err(unproven) => Err(unproven),
    }
}
