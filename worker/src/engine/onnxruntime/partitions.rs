//! Partitions that a model's recordings have been made ready for.
//!
//! To make one recording ready takes about a millisecond, and a model has a dozen or more. So a thread of its own does
//! it, one after the other, and a partition may be named as soon as its context is there: a batch whose recording
//! is not ready yet has it made next. What was prepared in good time makes no batch wait.
//!
//! Contexts are never given up: NVIDIA's driver would keep their memory all the same.
//!
//! A recording that allots memory while it runs, as cuBLAS's workspaces are, can be ready only once at a time. So each is
//! recorded as often as partitions may be ready, once for each **seat**.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use shadowslice_shared::batch::{Prepared, Unprepared};
use shadowslice_shared::groups::{Division, Groups, MAX_PARTITIONS, READY_PARTITIONS};

use crate::device::cuda::graph::{Executable, Recording, UploadStream};
use crate::device::cuda::partition::{GreenContext, SmGroups};
use crate::device::cuda::{CudaFault, CudaGpu};
use crate::errors::chain;

/// Orders that may wait for the thread: to make and to drop as many partitions as may be ready.
const ORDERS: usize = 2 * READY_PARTITIONS;

/// What the thread has made and nobody has looked at; when it is full, the thread waits.
const MADE: usize = 256;

/// Instead of a recording's number: none is needed before the others, or no further one at all.
const NONE_FIRST: usize = usize::MAX;
const NO_MORE: usize = usize::MAX - 1;

/// A copy of all of a model's recordings, which can be ready on one partition.
#[derive(Debug, Default)]
struct Seat(Vec<Recording>);

/// What the thread is to do.
enum Order {
    /// Make a partition ready at a seat that is free.
    Make { seat: usize, groups: Groups, first: Arc<AtomicUsize> },
    /// Drop what nothing is put on the GPU of any more; the seat is free then.
    Drop(Vec<Executable>),
}

/// What the thread has done.
enum Made {
    /// The partition's context, or it cannot be had.
    Context(Groups, Prepared),
    /// One recording.
    Recording(Groups, usize, Result<Executable, CudaFault>),
    /// All that there will be.
    All(Groups),
}

/// A partition that is ready, or is being made so.
#[derive(Debug)]
struct Partition {
    seat: usize,
    executables: Vec<Option<Executable>>,
    /// The recording that is needed before the others, for the thread to see.
    first: Arc<AtomicUsize>,
    complete: bool,
}

/// Makes recordings ready.
#[derive(Debug)]
struct Workshop {
    groups: SmGroups,
    /// Those that were ever made: the driver would not give their memory back.
    contexts: BTreeMap<Groups, Arc<GreenContext>>,
    seats: Vec<Seat>,
    uploads: UploadStream,
    /// Whether some recording could not be had on some partition, as kernels in clusters of SMs cannot on every one: then a
    /// partition is ready when all of it is.
    picky: bool,
    gpu: Arc<CudaGpu>,
}

/// Who makes partitions ready.
#[derive(Debug)]
enum Maker {
    /// As long as the worker warms up.
    Here(Option<Workshop>),
    /// From then on.
    Thread { orders: Option<SyncSender<Order>>, made: Receiver<Made>, thread: Option<JoinHandle<()>> },
}

/// The partitions of one model.
#[derive(Debug)]
pub(super) struct Partitions {
    ready: BTreeMap<Groups, Partition>,
    /// What became of partitions and was not asked for yet, also where it was noticed while a batch waited for a recording.
    news: VecDeque<Prepared>,
    division: Division,
    maker: Maker,
}

impl Partitions {
    /// None are ready yet.
    pub(super) fn new(groups: SmGroups, gpu: Arc<CudaGpu>) -> Result<Self, CudaFault> {
        let division = groups.division().clone();
        let seats = (0..READY_PARTITIONS).map(|_| Seat::default()).collect();
        let uploads = UploadStream::new(&gpu)?;
        let contexts = BTreeMap::new();
        let workshop = Workshop { groups, contexts, seats, uploads, picky: false, gpu };
        Ok(Self {
            ready: BTreeMap::new(),
            news: VecDeque::new(),
            division,
            maker: Maker::Here(Some(workshop)),
        })
    }

    /// How the GPU's SMs divide.
    pub(super) fn division(&self) -> &Division {
        &self.division
    }

    /// How often an execution must be recorded.
    pub(super) fn copies(&self) -> usize {
        READY_PARTITIONS
    }

    /// One more execution, recorded so often, while the worker warms up; returns its number.
    pub(super) fn add(&mut self, copies: Vec<Recording>) -> usize {
        let Maker::Here(Some(workshop)) = &mut self.maker else { return NONE_FIRST };
        let number = workshop.seats[0].0.len();
        for (seat, recording) in workshop.seats.iter_mut().zip(copies) {
            seat.0.push(recording);
        }
        number
    }

    /// Makes a partition ready; what came of it, if that is known at once.
    pub(super) fn prepare(&mut self, groups: Groups) -> Option<Prepared> {
        if self.ready.contains_key(&groups) {
            return Some(Prepared { groups, result: Ok(()), took_us: 0 });
        }
        let taken = |seat: &usize| self.ready.values().any(|partition| partition.seat == *seat);
        let Some(seat) = (0..READY_PARTITIONS).find(|seat| !taken(seat)) else {
            return Some(refused(groups, "as many partitions are ready as may be"));
        };
        let first = Arc::new(AtomicUsize::new(NONE_FIRST));
        let partition =
            Partition { seat, executables: Vec::new(), first: Arc::clone(&first), complete: false };
        match &mut self.maker {
            Maker::Here(workshop) => {
                let workshop = workshop.as_mut()?;
                let mut made = Vec::new();
                workshop.make(seat, groups, &first, |news| {
                    made.push(news);
                    true
                });
                self.ready.insert(groups, partition);
                made.into_iter().for_each(|made| self.take(made));
                let failed = self.news.iter().position(|prepared| prepared.result.is_err());
                let said = self.news.swap_remove_back(failed.unwrap_or(0));
                self.news.clear();
                said
            }
            Maker::Thread { orders, .. } => {
                let order = Order::Make { seat, groups, first };
                match orders.as_ref().map(|orders| orders.try_send(order)) {
                    Some(Ok(())) => {
                        self.ready.insert(groups, partition);
                        None
                    }
                    _ => Some(refused(groups, "too many partitions are being made ready")),
                }
            }
        }
    }

    /// What has come of a partition since the last call, one at a time.
    pub(super) fn made(&mut self) -> Option<Prepared> {
        while self.news.is_empty() {
            let Maker::Thread { made, .. } = &self.maker else { return None };
            let made = made.try_recv().ok()?;
            self.take(made);
        }
        self.news.pop_front()
    }

    /// Notes what the thread has done.
    fn take(&mut self, made: Made) {
        match made {
            Made::Context(groups, prepared) => {
                if prepared.result.is_err() {
                    self.ready.remove(&groups);
                }
                self.news.push_back(prepared);
            }
            Made::Recording(groups, number, Ok(executable)) => {
                if let Some(Partition { executables, .. }) = self.ready.get_mut(&groups) {
                    if executables.len() <= number {
                        executables.resize_with(number + 1, || None);
                    }
                    executables[number] = Some(executable);
                }
            }
            Made::Recording(groups, _, Err(fault)) => self.news.push_back(refused(groups, &chain(&fault))),
            Made::All(groups) => {
                if let Some(partition) = self.ready.get_mut(&groups) {
                    partition.complete = true;
                }
            }
        }
    }

    /// Whether a partition was made ready, or is being so.
    pub(super) fn has(&self, groups: Groups) -> bool {
        self.ready.contains_key(&groups)
    }

    /// A recording on a partition that was made ready; if need be it is waited for. `None` if there is none.
    pub(super) fn get(&mut self, groups: Groups, recording: usize) -> Option<&Executable> {
        loop {
            let partition = self.ready.get(&groups)?;
            let there = partition.executables.get(recording).is_some_and(Option::is_some);
            if there || partition.complete {
                break;
            }
            partition.first.store(recording, Ordering::Release);
            let Maker::Thread { made, .. } = &self.maker else { break };
            let made = made.recv().ok()?;
            self.take(made);
        }
        self.ready.get(&groups)?.executables.get(recording)?.as_ref()
    }

    /// Lets go of a partition.
    pub(super) fn forget(&mut self, groups: Groups) {
        // What is being made is waited for: one recording at most.
        while self.ready.get(&groups).is_some_and(|partition| !partition.complete) {
            self.ready[&groups].first.store(NO_MORE, Ordering::Release);
            let Maker::Thread { made, .. } = &self.maker else { break };
            let Ok(made) = made.recv() else { break };
            self.take(made);
        }
        let Some(partition) = self.ready.remove(&groups) else { return };
        if let Maker::Thread { orders: Some(orders), .. } = &self.maker {
            let executables = partition.executables.into_iter().flatten().collect();
            // Where the thread has too much to do, they are dropped here.
            orders.try_send(Order::Drop(executables)).ok();
        }
    }

    /// From now on a thread makes partitions ready.
    pub(super) fn warmed_up(&mut self) -> std::io::Result<()> {
        if let Maker::Here(workshop) = &mut self.maker
            && let Some(workshop) = workshop.take()
        {
            self.maker = workshop.into_thread()?;
        }
        Ok(())
    }
}

impl Drop for Maker {
    fn drop(&mut self) {
        let Self::Thread { orders, made, thread } = self else { return };
        drop(orders.take());
        // It may wait for room for what it has made.
        while made.recv().is_ok() {}
        if let Some(thread) = thread.take() {
            // It has told why it panicked.
            thread.join().ok();
        }
    }
}

impl Workshop {
    /// Makes a partition ready, and tells `tell` of each step; ends when that returns false.
    fn make(&mut self, seat: usize, groups: Groups, first: &AtomicUsize, mut tell: impl FnMut(Made) -> bool) {
        let begun = Instant::now();
        let context = self.context(groups);
        let took_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        let context = match context {
            Ok(context) => context,
            Err(why) => {
                tell(Made::Context(groups, Prepared { groups, result: Err(why), took_us }));
                return;
            }
        };
        let mut left: Vec<usize> = (0..self.seats[seat].0.len()).collect();
        let mut go_on = true;
        if self.picky {
            let all: Result<Vec<Executable>, CudaFault> =
                left.drain(..).map(|number| self.ready(seat, number, &context)).collect();
            let took_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
            let result = all.as_ref().map(drop).map_err(|fault| Unprepared::Impossible(chain(fault)));
            go_on = tell(Made::Context(groups, Prepared { groups, result, took_us }));
            for (number, executable) in all.into_iter().flatten().enumerate() {
                go_on = go_on && tell(Made::Recording(groups, number, Ok(executable)));
            }
        } else {
            go_on = go_on && tell(Made::Context(groups, Prepared { groups, result: Ok(()), took_us }));
        }
        while go_on && !left.is_empty() {
            let urgent = first.load(Ordering::Acquire);
            if urgent == NO_MORE {
                break;
            }
            let next = left.iter().position(|&number| number == urgent).unwrap_or(0);
            let number = left.remove(next);
            let made = self.ready(seat, number, &context);
            self.picky |= made.is_err();
            go_on = tell(Made::Recording(groups, number, made));
        }
        tell(Made::All(groups));
    }

    fn ready(
        &mut self,
        seat: usize,
        number: usize,
        context: &Arc<GreenContext>,
    ) -> Result<Executable, CudaFault> {
        self.seats[seat].0[number].ready_on(context, &self.uploads)
    }

    fn context(&mut self, groups: Groups) -> Result<Arc<GreenContext>, Unprepared> {
        if let Some(context) = self.contexts.get(&groups) {
            return Ok(Arc::clone(context));
        }
        if self.contexts.len() >= MAX_PARTITIONS {
            return Err(Unprepared::Exhausted);
        }
        let made = self.groups.context(groups).map_err(|fault| Unprepared::Impossible(chain(&fault)))?;
        let context = Arc::new(made);
        self.contexts.insert(groups, Arc::clone(&context));
        Ok(context)
    }

    fn into_thread(mut self) -> std::io::Result<Maker> {
        let (orders, ordered) = sync_channel(ORDERS);
        let (done, made) = sync_channel(MADE);
        let work = move || {
            // Without the context every order fails, and says why.
            self.gpu.bind().ok();
            while let Ok(order) = ordered.recv() {
                match order {
                    Order::Make { seat, groups, first } => {
                        let gpu = Arc::clone(&self.gpu);
                        self.make(seat, groups, &first, |news| {
                            let told = done.send(news).is_ok();
                            gpu.wake();
                            told
                        });
                    }
                    Order::Drop(executables) => {
                        // What was put on the GPU of them is through then.
                        self.gpu.synchronize().ok();
                        drop(executables);
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("partitions".to_owned()).spawn(work)?;
        Ok(Maker::Thread { orders: Some(orders), made, thread: Some(thread) })
    }
}

fn refused(groups: Groups, why: &str) -> Prepared {
    Prepared { groups, result: Err(Unprepared::Impossible(why.to_owned())), took_us: 0 }
}
