//! Makes a model's recordings ready for partitions, on a separate thread once the worker serves:
//! recording by recording, those that a batch waits for first.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};

use shadowslice_shared::groups::{Groups, READY_PARTITIONS};

use crate::device::cuda::graph::{Executable, Recording, UploadStream};
use crate::device::cuda::partition::GreenContext;
use crate::device::cuda::{CudaFault, CudaGpu, StreamMark};

/// In place of a recording's number: no recording goes first, or none at all is needed any more.
pub(super) const NONE_FIRST: usize = usize::MAX;
pub(super) const NO_MORE: usize = usize::MAX - 1;

#[derive(Debug)]
pub(super) struct InstantiateOrder {
    pub(super) seat: usize,
    pub(super) groups: Groups,
    pub(super) context: Arc<GreenContext>,
    pub(super) first: Arc<AtomicUsize>,
    /// Recordings that were ready at that seat before.
    pub(super) before: Option<StaleExecutables>,
}

/// Recordings by number, and when the GPU is through with them.
#[derive(Debug)]
pub(super) struct StaleExecutables {
    pub(super) executables: Vec<Option<Executable>>,
    pub(super) through: Option<StreamMark>,
}

#[derive(Debug)]
pub(super) enum InstantiatorEvent {
    /// The thread made one recording ready, or could not.
    Recording { groups: Groups, number: usize, result: Result<Executable, CudaFault> },
    /// The thread makes no further recordings ready on these groups.
    Finished { groups: Groups },
}

/// A copy of all of a model's recordings, which can be ready on one partition.
#[derive(Debug, Default)]
struct RecordingSet(Vec<Recording>);

#[derive(Debug)]
struct Unfinished {
    order: InstantiateOrder,
    left: Vec<usize>,
}

#[derive(Debug)]
pub(super) struct Instantiator {
    seats: Vec<RecordingSet>,
    uploads: UploadStream,
    unfinished: Vec<Unfinished>,
    gpu: Arc<CudaGpu>,
}

impl StaleExecutables {
    fn free(&mut self, number: usize) {
        self.wait();
        drop(self.executables.get_mut(number).and_then(Option::take));
    }

    fn wait(&mut self) {
        if let Some(through) = self.through.take() {
            through.wait();
        }
    }
}

impl Drop for StaleExecutables {
    fn drop(&mut self) {
        self.wait();
    }
}

impl Unfinished {
    /// Cancelled orders go first of all, because their end is waited for.
    fn urgency(&self) -> u8 {
        match self.order.first.load(Ordering::Acquire) {
            NO_MORE => 2,
            NONE_FIRST => 0,
            _ => 1,
        }
    }
}

impl Instantiator {
    pub(super) fn new(gpu: Arc<CudaGpu>) -> Result<Self, CudaFault> {
        let seats = (0..READY_PARTITIONS).map(|_| RecordingSet::default()).collect();
        let uploads = UploadStream::new(&gpu)?;
        Ok(Self { seats, uploads, unfinished: Vec::new(), gpu })
    }

    /// `copies`: a recording for each seat; returns the execution's number.
    pub(super) fn add(&mut self, copies: Vec<Recording>) -> usize {
        let number = self.seats[0].0.len();
        for (seat, recording) in self.seats.iter_mut().zip(copies) {
            seat.0.push(recording);
        }
        number
    }

    pub(super) fn finish(&mut self, order: InstantiateOrder, mut report: impl FnMut(InstantiatorEvent)) {
        self.begin(order);
        while !self.unfinished.is_empty() {
            self.step(&mut report);
        }
    }

    pub(super) fn work(
        mut self,
        order_rx: &Receiver<InstantiateOrder>,
        mut report: impl FnMut(InstantiatorEvent),
    ) {
        // Without the context every order fails, and the failure is reported.
        self.gpu.bind().ok();
        loop {
            let order = match self.unfinished.is_empty() {
                true => order_rx.recv().map_err(|_| TryRecvError::Disconnected),
                false => order_rx.try_recv(),
            };
            match order {
                Ok(order) => self.begin(order),
                Err(TryRecvError::Empty) => self.step(&mut report),
                Err(TryRecvError::Disconnected) => return,
            }
        }
    }

    fn begin(&mut self, order: InstantiateOrder) {
        let left = (0..self.seats[order.seat].0.len()).collect();
        self.unfinished.push(Unfinished { order, left });
    }

    fn step(&mut self, report: &mut impl FnMut(InstantiatorEvent)) {
        // Of equally urgent orders, the last one given goes first.
        let next = (0..self.unfinished.len()).max_by_key(|&index| self.unfinished[index].urgency());
        let Some(index) = next else { return };
        let Unfinished { order, left } = &mut self.unfinished[index];
        let urgent = order.first.load(Ordering::Acquire);
        if urgent == NO_MORE || left.is_empty() {
            let Unfinished { order, .. } = self.unfinished.remove(index);
            return report(InstantiatorEvent::Finished { groups: order.groups });
        }
        let next = left.iter().position(|&number| number == urgent).unwrap_or(0);
        let number = left.remove(next);
        if let Some(before) = &mut order.before {
            before.free(number);
        }
        let recording = &mut self.seats[order.seat].0[number];
        let result = recording.instantiate_on(&order.context, &self.uploads);
        report(InstantiatorEvent::Recording { groups: order.groups, number, result });
    }
}
