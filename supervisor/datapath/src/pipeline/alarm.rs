//! Waits to the microsecond. The reactor's own timers ring at whole milliseconds, and when the next batch
//! should be sent half a millisecond before the one that executes ends, that is too late.
#![allow(unsafe_code)] // adopting a descriptor into the reactor

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::Duration;

use nix::sys::time::{TimeSpec, TimeValLike};
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use shadowslice_shared::units::Moment;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::clock::Clock;

/// The alarm rings after this time at the latest, perhaps before it is due: kernel timers have a
/// longest time. The waiting task sets it again.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Rings at moments of its clock, one at a time.
#[derive(Debug)]
pub(crate) struct Alarm {
    clock: Clock,
    /// `None` if no timer could be had; the reactor's timers must do then.
    timer: Option<AsyncFd<Timer>>,
}

impl Alarm {
    /// An alarm on this clock. Within the reactor.
    pub(crate) fn new(clock: Clock) -> Self {
        let timer = Timer::new().and_then(adopt).inspect_err(|error| {
            tracing::warn!(%error, "no timer: batches may be sent 1 ms late; is the limit on open files too low?");
        });
        Self { clock, timer: timer.ok() }
    }

    /// Returns at `due`, or at once when that is past. Giving the wait up is no matter.
    pub(crate) async fn wait(&self, due: Moment) {
        let due = due.min(self.clock.now() + LONGEST);
        let rung = match &self.timer {
            Some(timer) => ring(timer, due.since(self.clock.now())).await,
            None => Err(io::ErrorKind::Unsupported.into()),
        };
        if rung.is_err() {
            tokio::time::sleep_until(self.clock.instant(due)).await;
        }
    }
}

fn adopt(timer: Timer) -> io::Result<AsyncFd<Timer>> {
    // SAFETY: a `Timer` names the same open file for as long as it lives, and the reactor's
    // registration ends before it does.
    let adopted = unsafe { AsyncFd::register_with_interest(timer, Interest::READABLE) }?;
    Ok(adopted)
}

async fn ring(timer: &AsyncFd<Timer>, after: Duration) -> io::Result<()> {
    timer.get_ref().set(after)?;
    // An earlier wait that was given up may leave the descriptor ready, but nothing to be read.
    timer.async_io(Interest::READABLE, Timer::rung).await
}

/// A kernel timer.
#[derive(Debug)]
struct Timer(TimerFd);

impl Timer {
    fn new() -> io::Result<Self> {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        Ok(Self(TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?))
    }

    fn set(&self, after: Duration) -> io::Result<()> {
        // Zero would disarm it.
        let after = i64::try_from(after.as_nanos()).unwrap_or(i64::MAX).max(1);
        let once = Expiration::OneShot(TimeSpec::nanoseconds(after));
        Ok(self.0.set(once, TimerSetTimeFlags::empty())?)
    }

    /// Would block until it has rung.
    fn rung(&self) -> io::Result<()> {
        Ok(self.0.wait()?)
    }
}

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_rings_when_it_should_and_not_before_whatever_was_given_up() {
        let clock = Clock::start();
        let alarm = Alarm::new(clock);
        assert!(alarm.timer.is_some());
        for us in [0, 1, 300, 1_500] {
            let given_up = alarm.wait(clock.now() + Duration::from_micros(us / 2));
            drop(tokio::time::timeout(Duration::ZERO, given_up).await);
            tokio::time::sleep(Duration::from_micros(us)).await;
            let due = clock.now() + Duration::from_micros(us);
            tokio::time::timeout(Duration::from_secs(10), alarm.wait(due)).await.unwrap();
            assert!(clock.now() >= due);
        }
        alarm.wait(Moment::default()).await;
        let never = alarm.wait(Moment::after_origin(Duration::MAX));
        tokio::time::timeout(Duration::from_millis(1), never).await.unwrap_err();
    }

    #[tokio::test]
    async fn without_a_timer_the_reactor_rings() {
        let clock = Clock::start();
        let alarm = Alarm { clock, timer: None };
        let due = clock.now() + Duration::from_micros(300);
        alarm.wait(due).await;
        assert!(clock.now() >= due);
    }
}
