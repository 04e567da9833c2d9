//! Makes a model's recordings ready for partitions, on a thread of its own once the worker serves.
//!
//! A partition's context comes first, and before any recording: it is what a change of share waits for. Recordings follow one
//! by one, those first that a batch waits for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use cudarc::driver::CudaEvent;
use shadowslice_shared::batch::Prepared;
use shadowslice_shared::groups::{Groups, READY_PARTITIONS};

use crate::device::cuda::graph::{Executable, Recording, UploadStream};
use crate::device::cuda::partition::{GreenContext, SmGroups};
use crate::device::cuda::{CudaFault, CudaGpu};
use crate::errors::chain;

/// Instead of a recording's number: none is needed before the others, or no further one at all.
pub(super) const NONE_FIRST: usize = usize::MAX;
pub(super) const NO_MORE: usize = usize::MAX - 1;

/// A partition that is to be made ready at a seat that is free.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) seat: usize,
    pub(super) groups: Groups,
    pub(super) first: Arc<AtomicUsize>,
    /// What was ready there before.
    pub(super) before: Option<Left>,
}

/// What was ready at a seat, and when the GPU is through with it.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) executables: Vec<Executable>,
    pub(super) through: Option<CudaEvent>,
}

/// What has been done.
#[derive(Debug)]
pub(super) enum Made {
    /// The partition's context, or it cannot be had.
    Context(Groups, Prepared),
    /// One recording.
    Recording(Groups, usize, Result<Executable, CudaFault>),
    /// All that there will be.
    All(Groups),
}

/// A copy of all of a model's recordings, which can be ready on one partition.
#[derive(Debug, Default)]
struct Seat(Vec<Recording>);

/// A partition that has its context, and not all recordings.
#[derive(Debug)]
struct Unfinished {
    seat: usize,
    groups: Groups,
    context: Arc<GreenContext>,
    first: Arc<AtomicUsize>,
    before: Option<Left>,
    /// Recordings that are not ready.
    left: Vec<usize>,
}

/// Makes recordings ready.
#[derive(Debug)]
pub(super) struct Workshop {
    groups: SmGroups,
    /// Those that were ever made: the driver would not give their memory back.
    contexts: BTreeMap<Groups, Arc<GreenContext>>,
    seats: Vec<Seat>,
    uploads: UploadStream,
    unfinished: Vec<Unfinished>,
    /// Whether some recording could not be had on some partition, as kernels in clusters of SMs cannot on every one: then a
    /// partition is ready when all of it is.
    picky: bool,
    gpu: Arc<CudaGpu>,
}

/// Lets go of what was ready, once the GPU is through with it.
fn free(left: Option<Left>) {
    if let Some(Left { executables, through }) = left {
        // If the GPU is lost, nothing of it runs any more.
        through.map(|through| through.synchronize().ok());
        drop(executables);
    }
}

impl Unfinished {
    /// Those before others that a batch waits for; at the very first those that nobody wants any more, as their end is waited
    /// for.
    fn urgency(&self) -> u8 {
        match self.first.load(Ordering::Acquire) {
            NO_MORE => 2,
            NONE_FIRST => 0,
            _ => 1,
        }
    }
}

impl Workshop {
    /// Without recordings as yet.
    pub(super) fn new(groups: SmGroups, gpu: Arc<CudaGpu>) -> Result<Self, CudaFault> {
        let seats = (0..READY_PARTITIONS).map(|_| Seat::default()).collect();
        let uploads = UploadStream::new(&gpu)?;
        let (contexts, unfinished) = (BTreeMap::new(), Vec::new());
        Ok(Self { groups, contexts, seats, uploads, unfinished, picky: false, gpu })
    }

    /// One more execution, a recording of it for each seat; returns its number.
    pub(super) fn add(&mut self, copies: Vec<Recording>) -> usize {
        let number = self.seats[0].0.len();
        for (seat, recording) in self.seats.iter_mut().zip(copies) {
            seat.0.push(recording);
        }
        number
    }

    /// Carries out an order to its end, telling `tell` of each step.
    pub(super) fn finish(&mut self, order: Order, mut tell: impl FnMut(Made)) {
        self.begin(order, &mut tell);
        while !self.unfinished.is_empty() {
            self.step(&mut tell);
        }
    }

    /// Carries out orders until there will be no more.
    pub(super) fn work(mut self, orders: &Receiver<Order>, mut tell: impl FnMut(Made)) {
        // Without the context every order fails, and says why.
        self.gpu.bind().ok();
        loop {
            let order = match self.unfinished.is_empty() {
                true => orders.recv().map_err(|_| TryRecvError::Disconnected),
                false => orders.try_recv(),
            };
            match order {
                Ok(order) => self.begin(order, &mut tell),
                Err(TryRecvError::Empty) => self.step(&mut tell),
                Err(TryRecvError::Disconnected) => return,
            }
        }
    }

    /// Makes a partition's context; its recordings follow.
    fn begin(&mut self, order: Order, tell: &mut impl FnMut(Made)) {
        let Order { seat, groups, first, before } = order;
        let begun = Instant::now();
        let prepared = |result| {
            let took_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
            Made::Context(groups, Prepared { groups, result, took_us })
        };
        let context = match self.context(groups) {
            Ok(context) => context,
            Err(why) => {
                free(before);
                return tell(prepared(Err(why)));
            }
        };
        let left: Vec<usize> = (0..self.seats[seat].0.len()).collect();
        if !self.picky {
            tell(prepared(Ok(())));
            return self.unfinished.push(Unfinished { seat, groups, context, first, before, left });
        }
        free(before);
        let all: Result<Vec<Executable>, CudaFault> =
            left.into_iter().map(|number| self.ready(seat, number, &context)).collect();
        tell(prepared(all.as_ref().map(drop).map_err(|fault| chain(fault))));
        for (number, executable) in all.into_iter().flatten().enumerate() {
            tell(Made::Recording(groups, number, Ok(executable)));
        }
        tell(Made::All(groups));
    }

    /// Makes the next recording.
    fn step(&mut self, tell: &mut impl FnMut(Made)) {
        // Of equals the one that was ordered last.
        let next = (0..self.unfinished.len()).max_by_key(|&index| self.unfinished[index].urgency());
        let Some(index) = next else { return };
        let partition = &mut self.unfinished[index];
        free(partition.before.take());
        let urgent = partition.first.load(Ordering::Acquire);
        if urgent == NO_MORE || partition.left.is_empty() {
            let partition = self.unfinished.remove(index);
            return tell(Made::All(partition.groups));
        }
        let next = partition.left.iter().position(|&number| number == urgent).unwrap_or(0);
        let number = partition.left.remove(next);
        let (seat, groups, context) = (partition.seat, partition.groups, Arc::clone(&partition.context));
        let made = self.ready(seat, number, &context);
        self.picky |= made.is_err();
        tell(Made::Recording(groups, number, made));
    }

    fn ready(
        &mut self,
        seat: usize,
        number: usize,
        context: &Arc<GreenContext>,
    ) -> Result<Executable, CudaFault> {
        self.seats[seat].0[number].ready_on(context, &self.uploads)
    }

    fn context(&mut self, groups: Groups) -> Result<Arc<GreenContext>, String> {
        if let Some(context) = self.contexts.get(&groups) {
            return Ok(Arc::clone(context));
        }
        if !groups.is_run() {
            return Err("its groups are no neighbours".to_owned());
        }
        let made = self.groups.context(groups).map_err(|fault| chain(&fault))?;
        let context = Arc::new(made);
        self.contexts.insert(groups, Arc::clone(&context));
        Ok(context)
    }
}
