//! Word to systemd, if it has started the supervisor: that it serves, that it moves, that it stops.

use std::future::pending;

use sd_notify::NotifyState;
use shadowslice_datapath::heartbeat::Heartbeat;

pub(crate) fn serving() {
    say(NotifyState::Ready);
}

/// The process that serves from now on.
pub(crate) fn succeeded_by(pid: u32) {
    say(NotifyState::MainPid(pid));
}

pub(crate) fn stopping() {
    say(NotifyState::Stopping);
}

/// Feeds its watchdog, if there is one, while the control thread moves. That this runs shows that
/// the data path does.
pub(crate) async fn feed_watchdog(pulse: Heartbeat) {
    let Some(limit) = sd_notify::watchdog_enabled() else { return pending().await };
    let mut turn = tokio::time::interval(limit / 3);
    loop {
        turn.tick().await;
        if pulse.is_alive() {
            say(NotifyState::Watchdog);
        }
    }
}

/// Without systemd nothing is said.
fn say(word: NotifyState<'_>) {
    let words = [word];
    if let Err(error) = sd_notify::notify(&words) {
        let [state] = words;
        tracing::warn!(
            %state,
            %error,
            "cannot notify systemd, which may restart the supervisor; check NOTIFY_SOCKET in the environment, and `NotifyAccess` in the unit"
        );
    }
}
