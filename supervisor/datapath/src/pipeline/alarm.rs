//! Waits to the microsecond. The reactor's own timers ring at whole milliseconds: too late where
//! the next batch should be sent half a millisecond before the one that executes ends.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use shadowslice_shared::units::Timestamp;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::socket::adopt;
use crate::clock::Clock;

/// The alarm rings after this time at the latest, perhaps before it is due: kernel timers have a
/// longest time. The waiting task sets it again.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Rings at moments of its clock, one at a time.
#[derive(Debug)]
pub(crate) struct Alarm {
    clock: Clock,
    /// `None` if no timer could be had; the reactor's timers must do then.
    timer: Option<AsyncFd<OwnedFd>>,
}

impl Alarm {
    /// Must be called within the reactor.
    pub(crate) fn new(clock: Clock) -> Self {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(io::Error::from);
        let timer = timer.and_then(adopt).inspect_err(|error| {
            tracing::warn!(%error, "cannot create a timer, so batches may be sent 1 ms late; raise the limit on open files");
        });
        Self { clock, timer: timer.ok() }
    }

    /// Returns at `due`, or at once when that is past. Giving the wait up is no matter.
    pub(crate) async fn wait(&self, due: Timestamp) {
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

async fn ring(timer: &AsyncFd<OwnedFd>, after: Duration) -> io::Result<()> {
    // Zero would disarm it.
    let it_value = Timespec::try_from(after.max(Duration::from_nanos(1))).map_err(io::Error::other)?;
    let once = Itimerspec { it_interval: Timespec::default(), it_value };
    timerfd_settime(timer.get_ref(), TimerfdTimerFlags::empty(), &once)?;
    // Reading would block until it has rung. An earlier wait that was given up may leave the
    // descriptor ready, but nothing to be read.
    timer.async_io(Interest::READABLE, |timer| Ok(rustix::io::read(timer, &mut [0; 8]).map(drop)?)).await
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
        alarm.wait(Timestamp::default()).await;
        let never = alarm.wait(Timestamp::after_origin(Duration::MAX));
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
