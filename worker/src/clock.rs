//! The clock that the supervisor and the workers share, and waits on that clock.

use std::os::fd::AsFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime};

/// The event that the peer has closed its end of a socket or will not send any more. nix does not
/// name it.
const PEER_CLOSED: PollFlags = PollFlags::from_bits_retain(libc::POLLRDHUP);

/// Returns `CLOCK_MONOTONIC` in nanoseconds.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux always has this clock");
    let part = |part| u64::try_from(part).expect("the time since boot is not negative");
    part(now.tv_sec()) * 1_000_000_000 + part(now.tv_nsec())
}

/// Returns the time `span` after `ns`. If the result exceeds the clock's range, returns the end of
/// the range, which the clock never reaches.
pub(crate) fn after(ns: u64, span: Duration) -> u64 {
    ns.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX))
}

/// The error of a wait that ended because the peer closed its end of the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HungUp;

pub(crate) fn wait_until(deadline_ns: u64, socket: impl AsFd) -> Result<(), HungUp> {
    loop {
        let left = deadline_ns.saturating_sub(now_ns());
        if left == 0 {
            return Ok(());
        }
        hears_within(left, &socket)?;
    }
}

pub(crate) fn still_wanted(socket: impl AsFd) -> Result<(), HungUp> {
    hears_within(0, &socket)
}

fn hears_within(ns: u64, socket: &impl AsFd) -> Result<(), HungUp> {
    let mut watched = [PollFd::new(socket.as_fd(), PEER_CLOSED)];
    match ppoll(&mut watched, Some(TimeSpec::from_duration(Duration::from_nanos(ns))), None) {
        Ok(0) | Err(Errno::EINTR) => Ok(()),
        Ok(_) | Err(_) => Err(HungUp),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_wait_ends_with_its_deadline_or_with_the_other_side() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let deadline = now_ns() + 2_000_000;
        assert_eq!(wait_until(deadline, &ours), Ok(()));
        assert!(now_ns() >= deadline);
        assert_eq!(still_wanted(&ours), Ok(()));
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(wait_until(u64::MAX, &ours), Err(HungUp));
        assert_eq!(still_wanted(&ours), Err(HungUp));
    }
}
