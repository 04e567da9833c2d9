//! Reads the key that decides when a model sleeps.

use super::keys::SLEEPS;
use super::reader::{Fields, Value};
use super::types::{ModelConfig, SleepConfig};
use super::units::show_duration;

/// Reads when the model sleeps.
pub(super) fn sleep(fields: &Fields<'_>) -> SleepConfig {
    let sleep = fields.read("sleep", one_sleep);
    if let SleepConfig::After(after) = sleep {
        fields.show("sleep", format!("{{after: {}}}", show_duration(after)));
    }
    sleep
}

fn one_sleep(value: &Value<'_>) -> Option<SleepConfig> {
    if value.is_scalar() {
        return value.one_of(&SLEEPS);
    }
    let keys = value.fields();
    let after = keys.required("after", "give the time without requests, for example `sleep: {after: 60s}`");
    after.and_then(|after| after.duration()).map(SleepConfig::After)
}

/// Records a fault for a standby of a model that may sleep.
pub(super) fn check_sleep(fields: &Fields<'_>, model: &ModelConfig) {
    if model.sleep.may_sleep() && model.standby {
        fields.fault("standby", "a standby would keep the weights on the GPU; remove `standby` or `sleep`");
    }
}
