//! The emulated GPU. While a batch executes, the worker marks its seat in the shared [`Pool`] as
//! occupied. The batch takes the time that the profile states. The batch takes longer if other
//! workers contend for the SMs.
//!
//! The emulated GPU behaves like a real stream. A batch starts when the previous batch has ended or
//! when the supervisor has sent the new batch, whichever is later. The time at which this thread
//! notices the batch does not matter. A late wake-up therefore delays one answer but not the next
//! batch, and the throughput matches the profile.

use std::io;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use rustix::thread::futex::{self, Timespec};
use shadowslice_shared::boot::{BootRefusal, DeviceMemory, PRIORITY_VARIABLE, SHARE_VARIABLE};
use shadowslice_shared::contention::{ClientPriority, Occupant, SharedGpu};
use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::pause::{MAX_BATCH_PAUSE, PauseWord, pieces};
use shadowslice_shared::pool::{Pool, SEATS};
use shadowslice_shared::profile::{Execution, ProcessMemory};
use shadowslice_shared::units::{Percent, Sms};

use super::StartedBatch;
use super::emulated_memory::EmulatedMemory;
use super::timeline::BatchProgress;
use crate::clock::{after, now_ns};
use shadowslice_shared::errors::chain;

#[derive(Debug)]
pub struct EmulatedGpu {
    pool: Pool,
    seat: u32,
    gpu: SharedGpu,
    /// The SMs of a share that is a percentage, or `None` if the share is a partition.
    share: Option<Occupant>,
    own: Occupant,
    priority: ClientPriority,
    execution: Option<Execution>,
    occupied: bool,
    /// The time at which the last batch ended.
    free_ns: u64,
    memory: EmulatedMemory,
    /// The worker's pause word, once the worker has mapped it.
    pause: Option<Arc<PauseWord>>,
}

impl EmulatedGpu {
    /// Takes `seat` in the GPU's pool. With a `division`, each batch states the partition on which
    /// it runs. Otherwise, an environment variable states the worker's share. Without `execution`,
    /// a batch takes only the time of its computation.
    pub fn open(
        sms: Sms,
        division: Option<Division>,
        seat: u32,
        pool: Option<OwnedFd>,
        execution: Option<Execution>,
    ) -> Result<Self, BootRefusal> {
        let share = share_of(std::env::var_os(SHARE_VARIABLE).as_deref())?;
        let pool = pool.ok_or_else(|| {
            BootRefusal::Setup("the supervisor did not pass the emulated GPU's pool".into())
        })?;
        let pool = Pool::adopt(pool).map_err(|fault| BootRefusal::Setup(chain(&fault)))?;
        if seat >= SEATS {
            return Err(BootRefusal::Setup(format!("seat {seat} does not exist in a pool of {SEATS} seats")));
        }
        // The default timer slack would extend each wait by 50 us beyond the time in the profile.
        nix::sys::prctl::set_timerslack(1)
            .map_err(|errno| BootRefusal::Setup(format!("cannot set the timer slack: {errno}")))?;
        let priority = priority_of(std::env::var_os(PRIORITY_VARIABLE).as_deref());
        let own = Occupant::anywhere(share.sms_of(sms)).with_priority(priority);
        let (gpu, share) = match division {
            Some(division) => (SharedGpu { sms, division: Some(division) }, None),
            None => (SharedGpu::new(sms), Some(own)),
        };
        let (occupied, free_ns, memory) = (false, now_ns(), EmulatedMemory::default());
        let pause = None;
        Ok(Self { pool, seat, gpu, share, own, priority, execution, occupied, free_ns, memory, pause })
    }

    pub fn sms(&self) -> Sms {
        self.own.sms
    }

    /// Lets the supervisor pause the batches with this word.
    pub fn obey(&mut self, pause: &Arc<PauseWord>) {
        self.pause = Some(Arc::clone(pause));
    }

    /// Returns the number of pieces of a batch of `rows` rows, or the reason why batches are not cut.
    pub fn pieces(&self, rows: u32) -> Result<u32, String> {
        let Some(_) = self.pause else { return Err("models that share a process do not wait".to_owned()) };
        let execution = self.execution.as_ref().ok_or("without a profile, batches take no time")?;
        Ok(pieces(execution.time(rows, f64::from(self.own.sms.0))))
    }

    /// Takes the memory that the profile states.
    pub fn take_memory(
        &mut self,
        supervisor: Option<&OwnedFd>,
        profile: ProcessMemory,
    ) -> io::Result<DeviceMemory> {
        self.memory = EmulatedMemory::take(supervisor, profile)?;
        Ok(self.memory.usage())
    }

    /// Returns the size of the weights, which a model releases while it sleeps, in bytes.
    pub fn weights(&self) -> u64 {
        self.memory.usage().weights
    }

    /// Allocates the weights again, and returns the time that a real GPU would take for this.
    pub fn wake(&mut self) -> io::Result<Duration> {
        self.memory.bring()?;
        let wake_time = self.memory.wake_time();
        // Batches that the supervisor sends during the wake execute after it.
        self.free_ns = after(now_ns(), wake_time);
        Ok(wake_time)
    }

    pub fn start(&mut self, rows: u32, groups: Groups, sent_ns: u64) -> StartedBatch {
        let seen_ns = now_ns();
        let own = self.share.unwrap_or_else(|| self.gpu.occupant(groups).with_priority(self.priority));
        let execution = self.execution.as_ref();
        self.occupy(Some(execution.map_or(own, |execution| own.executing(execution, rows))));
        let at_ns = match self.execution {
            Some(_) => self.free_ns.max(sent_ns.min(seen_ns)),
            None => seen_ns,
        };
        StartedBatch { at_ns, seen_ns, rows }
    }

    /// Waits for the end of the batch, and returns its duration. The duration includes the
    /// computation if that took longer than the profile states.
    pub fn finish(&mut self, started: StartedBatch) -> Duration {
        let computed_ns = started.at_ns.saturating_add(now_ns().saturating_sub(started.seen_ns));
        let planned_ns = match self.execution.clone() {
            Some(execution) => self.wait_through(&execution, started),
            None => computed_ns,
        };
        self.free_ns = planned_ns.max(computed_ns);
        Duration::from_nanos(self.free_ns.saturating_sub(started.at_ns))
    }

    pub fn leave(&mut self) {
        self.occupy(None);
    }

    /// Occupies or leaves the seat. Wakes the workers whose speed depends on this change.
    fn occupy(&mut self, occupant: Option<Occupant>) {
        let before = self.occupied.then_some(self.own);
        if occupant == before {
            return;
        }
        self.occupied = occupant.is_some();
        self.own = occupant.unwrap_or(self.own);
        self.pool.occupy(self.seat, occupant);
        // The fence makes sure that, if two workers start at the same time, at least one of them
        // sees the other.
        fence(Ordering::SeqCst);
        if [before, occupant].into_iter().flatten().any(|own| self.meets_others(own)) {
            wake_all(&self.pool);
        }
    }

    fn meets_others(&self, own: Occupant) -> bool {
        self.gpu.free(own, self.pool.others(self.seat)) < f64::from(own.sms.0)
    }

    fn time(&self, execution: &Execution, rows: u32) -> Duration {
        self.gpu.time(execution, rows, self.own, self.pool.others(self.seat))
    }

    /// Waits for the end of the batch. The speed of the batch depends on the other occupants of the
    /// pool. Returns the end time.
    fn wait_through(&mut self, execution: &Execution, started: StartedBatch) -> u64 {
        let mut progress = BatchProgress::start(started.at_ns, self.time(execution, started.rows));
        let pieces = pieces(execution.time(started.rows, f64::from(self.own.sms.0)));
        for piece in 0..pieces {
            let [begin, end] = [piece, piece + 1].map(|border| f64::from(border) / f64::from(pieces));
            if self.wait_while_paused() {
                progress.resume(begin, now_ns());
            }
            self.wait_until_complete(&mut progress, end, |gpu| gpu.time(execution, started.rows));
        }
        progress.end_ns()
    }

    /// Waits until the batch is complete up to the fraction `end`. `time` returns the time of the whole
    /// batch at its current speed.
    fn wait_until_complete(&self, progress: &mut BatchProgress, end: f64, time: impl Fn(&Self) -> Duration) {
        loop {
            let generation = self.pool.generation().load(Ordering::Acquire);
            progress.change(now_ns(), time(self));
            let end_ns = progress.reaches_ns(end);
            if end_ns <= now_ns() {
                return;
            }
            // The wait ends at the deadline, when the generation changes, or spuriously. In each
            // case, the loop computes the end of the piece again.
            wait_for_change(self.pool.generation(), generation, end_ns);
        }
    }

    /// Waits while the supervisor pauses this worker, which meanwhile occupies no SMs. Returns true if it
    /// had to wait.
    fn wait_while_paused(&mut self) -> bool {
        let Some(pause) = self.pause.clone() else { return false };
        if pause.current().is_none() {
            return false;
        }
        let own = self.own;
        self.occupy(None);
        let expires_ns = after(now_ns(), MAX_BATCH_PAUSE);
        while let Some(number) = pause.current() {
            if now_ns() >= expires_ns {
                pause.expire(number);
            } else {
                wait_for_change(pause.word(), number, expires_ns);
            }
        }
        self.occupy(Some(own));
        true
    }
}

impl Drop for EmulatedGpu {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Waits until the word no longer has this value, or until `deadline_ns`. May return earlier.
fn wait_for_change(word: &AtomicU32, value: u32, deadline_ns: u64) {
    let deadline = timespec(deadline_ns);
    let _why = futex::wait_bitset(word, futex::Flags::empty(), value, Some(&deadline), NonZeroU32::MAX);
}

fn timespec(ns: u64) -> Timespec {
    let part = |part| i64::try_from(part).expect("a u64 of nanoseconds has fewer seconds than an i64 holds");
    Timespec { tv_sec: part(ns / 1_000_000_000), tv_nsec: part(ns % 1_000_000_000) }
}

fn wake_all(pool: &Pool) {
    // The call cannot fail on a mapped word. If a worker still misses this wake-up, it wakes at its
    // own deadline.
    let _woken = futex::wake(pool.generation(), futex::Flags::empty(), i32::MAX as u32);
}

/// Returns the client priority from the environment variable that MPS also uses. The default is the
/// normal priority.
fn priority_of(variable: Option<&std::ffi::OsStr>) -> ClientPriority {
    let below = (ClientPriority::Below as u32).to_string();
    if variable.is_some_and(|text| text == below.as_str()) {
        ClientPriority::Below
    } else {
        ClientPriority::Normal
    }
}

/// Returns the share from the environment variable that MPS also uses. The default is the whole
/// GPU.
fn share_of(variable: Option<&std::ffi::OsStr>) -> Result<Percent, BootRefusal> {
    let Some(text) = variable else { return Ok(Percent::WHOLE) };
    let share =
        text.to_str().and_then(|text| text.parse().ok()).and_then(|percent| Percent::new(percent).ok());
    share.ok_or_else(|| {
        BootRefusal::Setup(format!("invalid {SHARE_VARIABLE} {text:?}; use a whole percentage from 1 to 100"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowslice_shared::profile::ExecutionRow;
    use shadowslice_shared::slab::AnswerSlab;
    use std::ffi::OsStr;
    use std::os::fd::AsFd;
    use std::thread;

    const MS: u64 = 1_000_000;

    /// Returns a worker at a seat of `pool`, whose share is `own` of the GPU's 100 SMs. A batch of
    /// one row takes `ms` milliseconds on 50 SMs.
    fn gpu(pool: &Pool, seat: u32, own: u32, ms: f64) -> EmulatedGpu {
        let execution = Execution::new(vec![Sms(50)], vec![ExecutionRow { batch: 1, ms: vec![ms] }]).unwrap();
        let own = Occupant::anywhere(Sms(own));
        EmulatedGpu {
            pool: Pool::adopt(pool.as_fd().try_clone_to_owned().unwrap()).unwrap(),
            seat,
            gpu: SharedGpu::new(Sms(100)),
            share: Some(own),
            own,
            priority: ClientPriority::Normal,
            execution: Some(execution),
            occupied: false,
            free_ns: now_ns(),
            memory: EmulatedMemory::default(),
            pause: None,
        }
    }

    #[test]
    fn shares_are_read_as_cuda_reads_them_and_nonsense_is_refused() {
        assert_eq!(share_of(None), Ok(Percent::WHOLE));
        assert_eq!(share_of(Some(OsStr::new("30"))), Ok(Percent::new(30).unwrap()));
        for nonsense in ["", "0", "101", "30%", "-1", "half"] {
            assert!(
                matches!(share_of(Some(OsStr::new(nonsense))), Err(BootRefusal::Setup(_))),
                "{nonsense:?}"
            );
        }
    }

    #[test]
    fn a_refusal_names_the_cause() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, &[0; 1 << 16]).unwrap();
        let unwritable = std::fs::File::open(file.path()).unwrap();
        let refused = EmulatedGpu::open(Sms(100), None, 0, Some(unwritable.into()), None).unwrap_err();
        assert!(refused.to_string().contains("EACCES"), "{refused}");
    }

    #[test]
    fn batches_in_a_row_take_exactly_what_the_profile_says_however_late_we_wake() {
        let pool = Pool::create().unwrap();
        let mut gpu = gpu(&pool, 0, 50, 2.0);
        let sent = now_ns();
        let first = gpu.free_ns.max(sent);
        for _ in 0..20 {
            let started = gpu.start(1, Groups::WHOLE, sent);
            assert_eq!(gpu.finish(started), Duration::from_millis(2));
        }
        assert_eq!(gpu.free_ns, first + 40 * MS);
        assert!(now_ns() >= gpu.free_ns);
        assert_eq!(pool.sms_in_use(), 50, "the seat is kept between batches");
        gpu.leave();
        assert_eq!(pool.sms_in_use(), 0);
    }

    #[test]
    fn after_a_pause_a_batch_starts_when_it_was_sent() {
        let pool = Pool::create().unwrap();
        let mut gpu = gpu(&pool, 0, 50, 1.0);
        gpu.free_ns = now_ns() - 500 * MS;
        let sent = now_ns() - 100 * MS;
        let started = gpu.start(1, Groups::WHOLE, sent);
        assert_eq!(started.at_ns, sent);
        assert_eq!(gpu.finish(started), Duration::from_millis(1));
        assert_eq!(gpu.free_ns, sent + MS);
        let from_the_future = gpu.start(1, Groups::WHOLE, u64::MAX);
        assert!(from_the_future.at_ns <= now_ns());
    }

    #[test]
    fn a_batch_that_was_sent_during_a_wake_executes_after_it() {
        let pool = Pool::create().unwrap();
        let mut gpu = gpu(&pool, 0, 50, 1.0);
        let sent = now_ns();
        let wake_time = gpu.wake().unwrap();
        let started = gpu.start(1, Groups::WHOLE, sent);
        assert!(started.at_ns >= after(sent, wake_time));
        assert_eq!(gpu.finish(started), Duration::from_millis(1));
    }

    #[test]
    fn a_computation_longer_than_the_profile_moves_the_timeline() {
        let pool = Pool::create().unwrap();
        let mut gpu = gpu(&pool, 0, 50, 0.001);
        let started = gpu.start(1, Groups::WHOLE, now_ns());
        while now_ns() < started.seen_ns + 3 * MS {
            std::hint::spin_loop();
        }
        assert!(gpu.finish(started) >= Duration::from_millis(3));
        assert!(gpu.free_ns >= started.at_ns + 3 * MS);
    }

    #[test]
    fn a_paused_batch_occupies_nothing_and_continues_when_the_pause_ends() {
        let pool = Pool::create().unwrap();
        let slab = AnswerSlab::create("test", 64).unwrap();
        let mut gpu = gpu(&pool, 0, 50, 4.0);
        gpu.obey(slab.pause_word());
        let started = gpu.start(1, Groups::WHOLE, now_ns());
        slab.pause_word().pause(1);
        let running = thread::spawn(move || (gpu.finish(started), gpu));
        while pool.sms_in_use() > 0 {
            thread::yield_now();
        }
        let paused_ns = now_ns();
        slab.pause_word().release();
        let (took, mut gpu) = running.join().unwrap();
        assert!(
            took >= Duration::from_nanos(paused_ns - started.at_ns) + Duration::from_millis(3),
            "{took:?}"
        );
        slab.pause_word().pause(2);
        let started = gpu.start(1, Groups::WHOLE, now_ns());
        let took = gpu.finish(started);
        assert!(took >= MAX_BATCH_PAUSE + Duration::from_millis(4), "{took:?}");
        assert_eq!(slab.pause_word().current(), None, "nobody ended the pause, so the worker did");
    }

    #[test]
    fn a_waiting_worker_notices_that_another_has_left() {
        let pool = Pool::create().unwrap();
        let mut ours = gpu(&pool, 0, 100, 5.0);
        let mut theirs = gpu(&pool, 1, 100, 1.0);
        // This batch takes so long that `ours` would be slowed down for days, unless the exit of
        // `theirs` wakes `ours`.
        let _never_finished = theirs.start(u32::MAX, Groups::WHOLE, now_ns());
        let started = ours.start(1, Groups::WHOLE, now_ns());
        let waiting = thread::spawn(move || ours.finish(started));
        drop(theirs);
        assert!(waiting.join().unwrap() >= Duration::from_millis(5));
    }
}
