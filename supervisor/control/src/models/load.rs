//! Clients' wishes for one model: to load it or to unload it.

use super::plan::{self, Change};
use super::registry::{Registry, Waits};
use super::{ChangeKind, ModelChange};
use shadowslice_config as config;
use shadowslice_datapath::peer::{self, Peer};
use shadowslice_datapath::repository::{ModelCommand, ModelCommandError};

pub(super) const UNLOADED: &str = "unloaded by a client";

impl Registry {
    /// The client may have gone when it is done, so that the audit's line is written here.
    pub(super) async fn grant(&mut self, wish: ModelCommand, by: &Peer) -> Result<(), ModelCommandError> {
        let outcome = match &wish {
            ModelCommand::Load { model, config } => {
                tracing::info!(model, config, "a client loads a model");
                self.load_again(model, config.as_deref()).await
            }
            ModelCommand::Unload { model } => self.unload_by_client(model),
        };
        let (action, model) = wish.action_and_model();
        let told = outcome.clone().map_err(|why| why.to_string());
        peer::audit(by, action, model, (&told).into());
        outcome
    }

    fn unload_by_client(&mut self, model: &str) -> Result<(), ModelCommandError> {
        if self.model(model).is_none() {
            return Err(ModelCommandError::Unknown("unload", model.to_owned()));
        }
        self.unload(model, UNLOADED);
        self.publish();
        Ok(())
    }

    /// Loads a model, or loads it again: its files are read, and `json` changes its configuration.
    pub(super) async fn load_again(
        &mut self,
        name: &str,
        json: Option<&str>,
    ) -> Result<(), ModelCommandError> {
        let (Some(old), Some(written)) = (self.model(name), self.written(name).cloned()) else {
            return Err(ModelCommandError::Unknown("load", name.to_owned()));
        };
        let failed = |why: String| ModelCommandError::Failed(name.to_owned(), why);
        let whole = self.config();
        let changes = json.unwrap_or("{}").to_owned();
        let read = self.files.read(move || config::changed_model(&whole, &written, &changes)).await;
        let new = read.map_err(failed)?.map_err(ModelCommandError::Invalid)?;
        if let Some(why) = new.broken {
            return Err(failed(why));
        }
        let (mut waits, loaded) = (Waits::new(), self.is_loaded(name));
        let change = plan::change(&old, &new);
        let (kind, begun) = if loaded {
            // Even if no key differs, a load reads the model's files again.
            self.change(&change.unwrap_or_else(|| Change::again(&new)), 0, &mut waits).await
        } else {
            (ChangeKind::Added, self.load(new, 0, &mut waits).await)
        };
        if begun.is_err() && !loaded {
            self.go_by(name, &old);
            self.publish();
        }
        begun.map_err(failed)?;
        self.publish();
        let row = ModelChange { name: name.to_owned(), change: kind, keys: Vec::new(), why: None };
        let mut rows = [row];
        self.settle_all(&mut rows, waits).await;
        let [ModelChange { why, .. }] = rows;
        let Some(why) = why else {
            self.undrain(name);
            if let Some(json) = json {
                self.changed_by_client(name, json);
                self.publish();
            }
            return Ok(());
        };
        // The requested configuration failed, so the next load starts from the old one.
        if !loaded {
            self.unload(name, "the model was loaded, but did not become ready");
            self.go_by(name, &old);
            self.publish();
        }
        Err(failed(why))
    }
}
