//! Notifications to systemd, if systemd has started the supervisor.

use std::future::pending;

pub(crate) use sd_notify::NotifyState;
use shadowslice_datapath::heartbeat::Heartbeat;

/// Feeds systemd's watchdog, if there is one, while the control thread responds. This task shows that the
/// data path responds too.
pub(crate) async fn feed_watchdog(pulse: Heartbeat) {
    let Some(limit) = sd_notify::watchdog_enabled() else { return pending().await };
    let mut turn = tokio::time::interval(limit / 3);
    loop {
        turn.tick().await;
        if pulse.is_alive() {
            notify(NotifyState::Watchdog);
        }
    }
}

/// Notifies systemd, if it has started the supervisor.
pub(crate) fn notify(word: NotifyState<'_>) {
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
