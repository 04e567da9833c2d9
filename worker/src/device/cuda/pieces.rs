//! The pieces of a long recording. Between two pieces, the GPU can execute another model's batch.
//!
//! A recorded batch is a chain of kernels, so a cut is a position in the chain. To find positions that
//! divide the execution time equally, this module executes the chain in small chunks and times each chunk.
//! Pauses and cuts are described in [`shadowslice_shared::pause`].

use std::collections::{HashMap, HashSet};
use std::mem::zeroed;
use std::ops::Range;
use std::ptr::null_mut;
use std::time::Duration;

use cudarc::driver::{DriverError, sys};
use shadowslice_shared::errors::chain;
use shadowslice_shared::pause::pieces;

use super::graph::{PieceExecutable, PieceGraph, Recording, clone_graph};
use super::{CudaError, CudaGpu, cuda_error};

/// The maximum number of chunks. The longest of eight pieces then takes at most a fifth of the batch
/// (measured on an H200 with seven models).
const MAX_CHUNKS: usize = 48;

/// The number of times that each chunk is timed. The shortest time counts.
const ROUNDS: usize = 3;

/// The reasons why a long recording is one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum UncutReason {
    #[error("the recorded kernels do not form a chain")]
    NoChain,
    #[error("one kernel takes most of the time of the batch")]
    NoBorder,
    #[error("the driver cannot divide the recording")]
    Driver(#[source] CudaError),
}

/// The result of all cuts of a worker's recordings.
#[derive(Debug, Clone, Copy, Default)]
pub(super) enum CutSummary {
    /// The worker has recorded nothing yet.
    #[default]
    Nothing,
    /// The largest number of pieces of a recording.
    Pieces(usize),
    /// A long recording is one piece.
    Uncut(UncutReason),
}

impl CutSummary {
    fn add(&mut self, cut: Result<usize, UncutReason>) {
        *self = match (*self, cut) {
            (Self::Uncut(why), _) | (_, Err(why)) => Self::Uncut(why),
            (Self::Nothing, Ok(pieces)) => Self::Pieces(pieces),
            (Self::Pieces(most), Ok(pieces)) => Self::Pieces(most.max(pieces)),
        }
    }
}

impl CudaGpu {
    /// Cuts a recording into pieces of about equal time. Executes the recording several times, so its inputs
    /// must be in place. A recording that is short or cannot be cut stays as it is.
    pub fn cut(&self, recording: Recording) -> Result<Recording, CudaError> {
        // Without pauses, pieces would only cost time.
        let ([whole], Some(_)) = (&recording.pieces[..], self.pause.get()) else { return Ok(recording) };
        let executable = whole.instantiate()?;
        let total: f32 = self.time(std::slice::from_ref(&executable))?.iter().sum();
        drop(executable);
        let wanted = pieces(Duration::from_secs_f32(total.max(0.0) / 1e3)) as usize;
        if wanted == 1 {
            self.cuts.lock().add(Ok(1));
            return Ok(recording);
        }
        let cut = self.cut_equally(whole, wanted);
        self.cuts.lock().add(cut.as_ref().map(Vec::len).map_err(|why| *why));
        Ok(cut.map_or(recording, |pieces| Recording { pieces }))
    }

    /// Returns the number of pieces of the largest batch, or the reason why batches are not cut.
    pub fn pieces(&self) -> Result<u32, String> {
        match (self.pause.get(), *self.cuts.lock()) {
            (None, _) => {
                Err("models that share a process, or whose GPU cannot read host memory, do not wait"
                    .to_owned())
            }
            (_, CutSummary::Nothing) => Err("batches are not recorded as CUDA graphs".to_owned()),
            (_, CutSummary::Uncut(why)) => Err(chain(&why)),
            (_, CutSummary::Pieces(most)) => Ok(u32::try_from(most).unwrap_or(u32::MAX)),
        }
    }

    fn cut_equally(&self, whole: &PieceGraph, wanted: usize) -> Result<Vec<PieceGraph>, UncutReason> {
        let nodes = whole.chain().map_err(list_error)?.ok_or(UncutReason::NoChain)?.len();
        let chunks = nodes.min(MAX_CHUNKS);
        let marks: Vec<usize> = (0..=chunks).map(|chunk| chunk * nodes / chunks).collect();
        let ranges = marks.windows(2).map(|pair| pair[0]..pair[1]);
        let graphs =
            ranges.map(|range| whole.part(range).map_err(list_error)).collect::<Result<Vec<_>, _>>()?;
        let executables = graphs.iter().map(PieceGraph::instantiate).collect::<Result<Vec<_>, _>>();
        let executables = executables.map_err(UncutReason::Driver)?;
        let times = self.time(&executables).map_err(UncutReason::Driver)?;
        let cuts = cuts(&marks, &times, wanted);
        if cuts.len() < 3 {
            return Err(UncutReason::NoBorder);
        }
        cuts.windows(2).map(|pair| whole.part(pair[0]..pair[1]).map_err(list_error)).collect()
    }

    /// Executes graphs one after the other, and returns the time of each in ms.
    fn time(&self, graphs: &[PieceExecutable]) -> Result<Vec<f32>, CudaError> {
        let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let event = || self.context.new_event(timed).map_err(cuda_error("create an event"));
        let events = (0..=graphs.len()).map(|_| event()).collect::<Result<Vec<_>, _>>()?;
        let mark = |event: usize| events[event].record(&self.compute).map_err(cuda_error("record an event"));
        let mut shortest = vec![f32::INFINITY; graphs.len()];
        for _ in 0..ROUNDS {
            mark(0)?;
            for (index, graph) in graphs.iter().enumerate() {
                self.launch(graph)?;
                mark(index + 1)?;
            }
            self.synchronize()?;
            for (time, pair) in shortest.iter_mut().zip(events.windows(2)) {
                let took = pair[0].elapsed_ms(&pair[1]).map_err(cuda_error("time a graph"))?;
                *time = time.min(took);
            }
        }
        Ok(shortest)
    }
}

impl PieceGraph {
    /// Returns the nodes in the order of their execution, or `None` if they do not form a chain.
    fn chain(&self) -> Result<Option<Vec<sys::CUgraphNode>>, DriverError> {
        let nodes = self.nodes()?;
        let mut count = 0;
        // SAFETY: with null pointers, the call writes only the number of edges.
        unsafe { sys::cuGraphGetEdges_v2(self.graph, null_mut(), null_mut(), null_mut(), &mut count) }
            .result()?;
        if count + 1 != nodes.len() {
            return Ok(None);
        }
        let (mut from, mut to) = (vec![null_mut(); count], vec![null_mut(); count]);
        // A kernel can begin before its predecessor has ended, which the data of the edge between them states.
        // Across a cut, it begins later. SAFETY: the data consists of numbers, for which zeros are valid.
        let mut kinds: Vec<sys::CUgraphEdgeData> = vec![unsafe { zeroed() }; count];
        let (sources, targets) = (from.as_mut_ptr(), to.as_mut_ptr());
        // SAFETY: all buffers have room for the edges counted above.
        unsafe { sys::cuGraphGetEdges_v2(self.graph, sources, targets, kinds.as_mut_ptr(), &mut count) }
            .result()?;
        let targets: HashSet<_> = to.iter().copied().collect();
        let next: HashMap<_, _> = from.into_iter().zip(to).collect();
        let first = nodes.iter().copied().find(|node| !targets.contains(node));
        let chain: Vec<_> = std::iter::successors(first, |node| next.get(node).copied()).collect();
        Ok((chain.len() == nodes.len()).then_some(chain))
    }

    /// Returns a copy of a part of the chain.
    fn part(&self, range: Range<usize>) -> Result<Self, DriverError> {
        // SAFETY: this value owns the graph, and nothing changes it during the call.
        let copy = unsafe { clone_graph(self.graph, &self.context) }?;
        let nodes = copy.chain()?.unwrap_or_default();
        for (_, node) in nodes.into_iter().enumerate().filter(|(index, _)| !range.contains(index)) {
            // SAFETY: the node belongs to the copy, and is destroyed only once.
            unsafe { sys::cuGraphDestroyNode(node) }.result()?;
        }
        Ok(copy)
    }
}

/// Returns the positions in the chain at which the pieces start and end. Chunk `n` reaches from `marks[n]`
/// to `marks[n + 1]`, and takes `times[n]`.
fn cuts(marks: &[usize], times: &[f32], wanted: usize) -> Vec<usize> {
    let total: f32 = times.iter().sum();
    let (mut cuts, mut spent) = (vec![0], 0.0);
    for (time, &mark) in times.iter().zip(&marks[1..]) {
        spent += time;
        if cuts.len() < wanted && spent >= total * cuts.len() as f32 / wanted as f32 {
            cuts.push(mark);
        }
    }
    let end = marks.last().copied().unwrap_or_default();
    if cuts.last() != Some(&end) {
        cuts.push(end);
    }
    cuts
}

fn list_error(source: DriverError) -> UncutReason {
    UncutReason::Driver(cuda_error("cut a recorded graph")(source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_take_about_the_same_time_and_cover_the_whole_chain() {
        assert_eq!(cuts(&[0, 3, 5, 7, 9], &[1.0, 1.0, 1.0, 1.0], 2), [0, 5, 9]);
        assert_eq!(cuts(&[0, 1, 2, 3, 4], &[5.0, 1.0, 1.0, 1.0], 4), [0, 1, 2, 3, 4]);
        assert_eq!(cuts(&[0, 10], &[3.0], 4), [0, 10], "a single chunk is not cut");
        assert_eq!(cuts(&[0, 2, 4], &[1.0, 9.0], 2), [0, 4], "no border is near the middle");
    }
}
