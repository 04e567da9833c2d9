//! What a supervisor has come to know beyond its configuration: kept in a file, so that the next one
//! goes on from there.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use shadowslice_shared::units::Percent;

use super::ModelSet;
use super::by_clients::ByClients;
use shadowslice_config::ModelConfig;
use shadowslice_datapath::readiness::HostState;
use shadowslice_datapath::router::Router;

/// Of the file, in bytes; a thousand models have 200 kB.
const MOST: u64 = 4 << 20;

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Known {
    /// Whether an operator has drained the host.
    pub drained: bool,
    pub models: BTreeMap<String, KnownModel>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct KnownModel {
    /// As the configuration had it. If it has another one now, that is what the operator wants.
    pub initial_percent: u32,
    /// In force.
    pub share_percent: u32,
    /// Whether no policy may change it.
    pub held: bool,
    pub drained: bool,
    /// By a client.
    pub unloaded: bool,
    /// Where it was.
    pub gpu: Option<usize>,
    /// The clients' changes of its configuration.
    by_clients: ByClients,
}

impl Known {
    pub fn of(models: &ModelSet, router: &Router) -> Self {
        let served = models.served.iter().map(|served| {
            let report = served.report.borrow();
            let known = KnownModel {
                initial_percent: served.model.share.initial.get(),
                share_percent: report.share.get(),
                held: report.held,
                drained: router.is_model_drained(&served.model.name),
                unloaded: false,
                gpu: Some(served.model.gpu),
                by_clients: models.by_clients.get(&served.model.name).cloned().unwrap_or_default(),
            };
            (served.model.name.clone(), known)
        });
        let unloaded = models.unloaded.iter().map(|unloaded| {
            let initial_percent = unloaded.model.share.initial.get();
            let gpu = Some(unloaded.model.gpu);
            let known = KnownModel { initial_percent, unloaded: true, gpu, ..KnownModel::default() };
            (unloaded.model.name.clone(), known)
        });
        Self { drained: router.host() == HostState::Drained, models: served.chain(unloaded).collect() }
    }

    /// Nothing where there is no such file. One that cannot be read is told to the log.
    pub fn read(path: &Path) -> Self {
        let read = || -> io::Result<Self> {
            let mut text = Vec::new();
            fs::File::open(path)?.take(MOST).read_to_end(&mut text)?;
            Ok(serde_json::from_slice(&text)?)
        };
        match read() {
            Ok(known) => known,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::default(),
            Err(error) => {
                let path = path.display();
                tracing::warn!(
                    %path,
                    %error,
                    "cannot read the models' saved state; models start with their initial shares, and drains, holds, unloaded models and clients' changes are lost; repeat those that you need"
                );
                Self::default()
            }
        }
    }

    /// Never leaves half a file.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let new = path.with_extension("new");
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(new, path)
    }

    /// The share with which a model begins, else this one, and whether it is held.
    pub(super) fn share(&self, model: &ModelConfig, otherwise: Percent) -> (Percent, bool) {
        let known = self.models.get(&model.name);
        let as_before = known.filter(|known| known.initial_percent == model.share.initial.get());
        let range = model.share.min..=model.share.max;
        let share = as_before.and_then(|known| {
            let share = Percent::new(known.share_percent).ok()?;
            range.contains(&share).then_some((share, known.held))
        });
        share.unwrap_or((otherwise, false))
    }

    pub(super) fn gpu(&self, model: &str) -> Option<usize> {
        self.models.get(model)?.gpu
    }

    pub(super) fn by_clients(&self, model: &str) -> Option<&ByClients> {
        self.models.get(model).map(|known| &known.by_clients).filter(|by_clients| !by_clients.is_empty())
    }

    pub(super) fn is_unloaded(&self, model: &str) -> bool {
        self.models.get(model).is_some_and(|known| known.unloaded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_garbage_is_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("known.json");
        assert_eq!(Known::read(&path), Known::default());
        let model =
            KnownModel { initial_percent: 40, share_percent: 20, held: true, ..KnownModel::default() };
        let known = Known { drained: true, models: BTreeMap::from([("m".to_owned(), model)]) };
        known.write(&path).unwrap();
        assert_eq!(Known::read(&path), known);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing else is left");
        fs::write(&path, r#"{"models": {"m": {"held": true, "later": 1}}}"#).unwrap();
        assert!(Known::read(&path).models["m"].held, "as a later version may write it");
        for garbage in ["", "{", "[]", r#"{"models": {"m": {"share_percent": -1}}}"#] {
            fs::write(&path, garbage).unwrap();
            assert_eq!(Known::read(&path), Known::default(), "{garbage}");
        }
    }
}
