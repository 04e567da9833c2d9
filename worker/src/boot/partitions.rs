//! The proof of a worker whose share is a partition inside the process.
//!
//! A batch may fail on some numbers of SMs. For example, a kernel may need more SMs than a
//! partition has, or may rely on the number of SMs that it had when it was recorded. Before a
//! worker serves, it therefore runs the proof with every number of groups, always on the first
//! groups of the GPU. After the proof, the worker can use any partition. A model that a host runs,
//! such as a Python model, also makes a trial run on each partition before the first use of that
//! partition, because kernels whose blocks form clusters may not fit on every partition of the same
//! size.

use std::fs::File;
use std::time::{Duration, Instant};

use shadowslice_shared::boot::{BootRefusal, PartitionProof, PartitionSpec, ProvenPartitions, WarmTime};
use shadowslice_shared::groups::Groups;

use crate::engine::ModelEngine;
use crate::proof::{self, ProofError, Prover};

/// The time limit for the proofs of all partitions. After this time, the worker skips the proofs of
/// the remaining, smaller partitions.
const PROOFS_TIMEOUT: Duration = Duration::from_secs(60);

const TOO_SLOW: &str = "proving the larger partitions took more than a minute, so this one was not tried";
const SMALLEST_UNFIT: &str = "the kernels of the smallest batch size do not fit on this number of SMs";
const OTHER_DIVISION: &str = "the driver groups the SMs in this process differently than in earlier ones";

/// Runs the proof with each number of groups. `times` are the batch times from the proof on the
/// whole GPU, which has already succeeded. Also prepares the partition on which the worker starts.
pub(super) fn prove(
    prover: &mut Prover<'_>,
    reference: &File,
    PartitionSpec { division, groups }: &PartitionSpec,
    times: &[WarmTime],
) -> Result<ProvenPartitions, ProofError> {
    let engine = &*prover.engine;
    let movable = engine.check_movable(&prover.signature.inputs, prover.warm_up.batched);
    movable.map_err(BootRefusal::NoPartitions)?;
    if engine.division().is_some_and(|found| found != division) {
        return Err(BootRefusal::NoPartitions(OTHER_DIVISION.to_owned()).into());
    }
    let (mut proofs, begun) = (Vec::new(), Instant::now());
    // If the engine does not run on a real GPU's SMs, batches run the same way on every partition,
    // and the proof on the whole GPU is enough.
    let alike = prover.engine.division().is_none();
    for count in (1..=division.count()).rev() {
        let result = if alike || count == division.count() {
            Ok(times.to_vec())
        } else if begun.elapsed() > PROOFS_TIMEOUT {
            Err(TOO_SLOW.to_owned())
        } else {
            try_on(prover, reference, Groups::first(count))?
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
    Ok(ProvenPartitions { counts: proofs, ready: begin(prover.engine, *groups) })
}

/// Tries the partition, and then smaller and smaller parts of it. Returns the first part on which
/// the engine can run the model, or the whole GPU if there is none.
fn begin(engine: &mut ModelEngine, groups: Groups) -> Groups {
    if groups == Groups::WHOLE {
        return groups;
    }
    let mut parts = (1..=groups.count()).rev().map(|count| groups.iter().take(count).collect());
    let can_have = |part: &Groups| match engine.prepare(*part).map(|prepared| prepared.result) {
        Some(Ok(())) if engine.try_on(*part).is_err() => {
            engine.forget(*part, false);
            false
        }
        Some(Err(_)) => {
            engine.forget(*part, false);
            false
        }
        Some(Ok(())) | None => true,
    };
    parts.find(can_have).unwrap_or(Groups::WHOLE)
}

fn try_on(
    prover: &mut Prover<'_>,
    reference: &File,
    groups: Groups,
) -> Result<Result<Vec<WarmTime>, String>, ProofError> {
    if let Some(Err(why)) = prover.engine.prepare(groups).map(|prepared| prepared.result) {
        prover.engine.forget(groups, false);
        return Ok(Err(why.to_string()));
    }
    let proven = proof::prove(prover, reference, groups);
    prover.engine.forget(groups, false);
    match proven {
        Ok(times) if times.is_empty() => Ok(Err(SMALLEST_UNFIT.to_owned())),
        Ok(times) => Ok(Ok(times)),
        // A refusal is not fatal here. The run also fails if a kernel does not fit on these groups,
        // and larger partitions may still work.
        Err(ProofError::Refused(refusal)) => Ok(Err(refusal.to_string())),
        Err(unproven) => Err(unproven),
    }
}
