//! Timers with a resolution of microseconds. The timers of the async reactor fire at whole
//! milliseconds. This resolution is too low if the next batch is due half a millisecond before the
//! running batch ends.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use shadowslice_shared::units::Timestamp;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::workers::adopt;
use crate::clock::Clock;

/// The longest wait. Kernel timers have a limit, so a longer wait returns early, and the waiting
/// task sets the alarm again.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// An alarm that waits for one point in time.
#[derive(Debug)]
pub struct Alarm {
    clock: Clock,
    /// The timer. If the kernel could not create one, this is `None`, and the alarm uses the
    /// reactor's timers.
    timer: Option<AsyncFd<OwnedFd>>,
}

impl Alarm {
    /// Creates an alarm. Call this function from a task of the async reactor.
    pub fn new(clock: Clock) -> Self {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(io::Error::from);
        let timer = timer.and_then(adopt).inspect_err(|error| {
            tracing::warn!(%error, "cannot create a timer, so batches may be sent 1 ms late; raise the limit on open files");
        });
        Self { clock, timer: timer.ok() }
    }

    /// Waits until `due`. Returns immediately if `due` has passed. Dropping the future has no
    /// effect on later waits.
    pub async fn wait(&self, due: Timestamp) {
        let due = due.min(self.clock.now() + LONGEST);
        let fired = match &self.timer {
            Some(timer) => fire(timer, due.since(self.clock.now())).await,
            None => Err(io::ErrorKind::Unsupported.into()),
        };
        if fired.is_err() {
            tokio::time::sleep_until(self.clock.instant(due)).await;
        }
    }
}

async fn fire(timer: &AsyncFd<OwnedFd>, after: Duration) -> io::Result<()> {
    // A value of zero would disarm the timer.
    let it_value = Timespec::try_from(after.max(Duration::from_nanos(1))).map_err(io::Error::other)?;
    let once = Itimerspec { it_interval: Timespec::default(), it_value };
    timerfd_settime(timer.get_ref(), TimerfdTimerFlags::empty(), &once)?;
    // Reads do not block the thread, and `async_io` waits until the timer fires. After an abandoned
    // wait, the descriptor may be reported as readable although there is nothing to read.
    timer.async_io(Interest::READABLE, |timer| Ok(rustix::io::read(timer, &mut [0; 8]).map(drop)?)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_fires_on_time_even_after_abandoned_waits() {
        let clock = Clock::start();
        let alarm = Alarm::new(clock);
        assert!(alarm.timer.is_some());
        for us in [0, 1, 300, 1_500] {
            let abandoned = alarm.wait(clock.now() + Duration::from_micros(us / 2));
            drop(tokio::time::timeout(Duration::ZERO, abandoned).await);
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
    async fn without_a_timer_the_reactor_is_used() {
        let clock = Clock::start();
        let alarm = Alarm { clock, timer: None };
        let due = clock.now() + Duration::from_micros(300);
        alarm.wait(due).await;
        assert!(clock.now() >= due);
    }
}
