//! What a worker proves if its share is a partition inside the process.
//!
//! How a batch fares depends on the number of SMs, and not on which they are: a kernel may not fit
//! on them, or may count on the SMs that there were when it was recorded. So every number of groups
//! is proven before the worker serves, on the first groups; any partition may be used afterwards. A
//! hosted model is tried on each, too, before it is used.

use std::fs::File;
use std::time::{Duration, Instant};

use shadowslice_shared::boot::{BootRefusal, PartitionProof, PartitionSpec, ProvenPartitions, WarmTime};
use shadowslice_shared::groups::Groups;

use crate::engine::Engine;
use crate::proof::{self, Trial, Unproven};

/// The time for the proofs of all partitions. A model that needs more has fewer partitions, the
/// largest ones.
const PROOFS: Duration = Duration::from_secs(60);

const TOO_SLOW: &str = "proving all partitions would take longer than a minute";
const SMALLEST_UNFIT: &str = "kernels of the smallest batch size do not fit on so few SMs";
const OTHERWISE: &str = "this process finds other groups of SMs than those before it";

/// The answers of the whole GPU have been proven, with `times`. Also makes the partition ready
/// that the worker begins with.
pub(super) fn prove(
    trial: &mut Trial<'_>,
    reference: &File,
    PartitionSpec { division, groups }: &PartitionSpec,
    times: &[WarmTime],
) -> Result<ProvenPartitions, Unproven> {
    if let Engine::OnGpu(engine) = &*trial.engine {
        let movable = engine.movable(&trial.signature.inputs, trial.warm_up.batched);
        movable.map_err(BootRefusal::NoPartitions)?;
        if engine.division() != Some(division) {
            return Err(BootRefusal::NoPartitions(OTHERWISE.to_owned()).into());
        }
    }
    if let Engine::Hosted(hosted) = &*trial.engine {
        hosted.movable().map_err(BootRefusal::NoPartitions)?;
        if hosted.division().is_some_and(|found| found != division) {
            return Err(BootRefusal::NoPartitions(OTHERWISE.to_owned()).into());
        }
    }
    let (mut proofs, begun) = (Vec::new(), Instant::now());
    // Without SMs of its own to run on, a batch runs alike on each partition.
    let alike = !trial.engine.runs_on_groups();
    for count in (1..=division.count()).rev() {
        let result = if alike || count == division.count() {
            Ok(times.to_vec())
        } else if begun.elapsed() > PROOFS {
            Err(TOO_SLOW.to_owned())
        } else {
            try_on(trial, reference, Groups::first(count))?
        };
        proofs.push(PartitionProof { groups: count, result });
    }
    proofs.reverse();
    let mut parts = proofs.iter().filter(|proof| proof.groups < division.count());
    if let Some(Err(why)) = parts.clone().next_back().map(|proof| proof.result.clone())
        && parts.all(|proof| proof.result.is_err())
    {
        return Err(BootRefusal::NoPartitions(why).into());
    }
    Ok(ProvenPartitions { counts: proofs, ready: begin(trial.engine, *groups) })
}

/// Makes as large a part of the partition ready as the model can have, and returns that part.
fn begin(engine: &mut Engine, groups: Groups) -> Groups {
    if groups == Groups::WHOLE {
        return groups;
    }
    let mut parts = (1..=groups.count()).rev().map(|count| groups.iter().take(count).collect());
    let can_have = |part: &Groups| match engine.prepare(*part).map(|prepared| prepared.result) {
        Some(Ok(())) if engine.try_on(*part).is_err() => {
            engine.forget(*part);
            false
        }
        Some(Err(_)) => {
            engine.forget(*part);
            false
        }
        Some(Ok(())) | None => true,
    };
    parts.find(can_have).unwrap_or(Groups::WHOLE)
}

fn try_on(
    trial: &mut Trial<'_>,
    reference: &File,
    groups: Groups,
) -> Result<Result<Vec<WarmTime>, String>, Unproven> {
    if let Some(Err(why)) = trial.engine.prepare(groups).map(|prepared| prepared.result) {
        trial.engine.forget(groups);
        return Ok(Err(why.to_string()));
    }
    let proven = proof::prove(trial, reference, groups);
    trial.engine.forget(groups);
    match proven {
        Ok(times) if times.is_empty() => Ok(Err(SMALLEST_UNFIT.to_owned())),
        Ok(times) => Ok(Ok(times)),
        // A kernel that does not fit makes the run fail, too.
        Err(Unproven::Refused(refusal)) => Ok(Err(refusal.to_string())),
        Err(unproven) => Err(unproven),
    }
}
