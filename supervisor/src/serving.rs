//! The service itself: from the takeover or the start until the last request is answered.

use std::sync::Arc;

use shadowslice_config::Config;
use shadowslice_datapath::phase::{Phase, reached};
use shadowslice_datapath::repository::Repository;
use shadowslice_datapath::sockets::{Inherited, PassableSocket};
use shadowslice_ingress::Ingress;
use shadowslice_operations::access_log::AccessLogWriter;
use shadowslice_succession::{FinalState, Predecessor};

use crate::running::{Running, all_ready};
use crate::serve::{Failed, Place, Shared, unavailable};
use crate::systemd;
use crate::telemetry::Telemetry;

pub(crate) struct Serving<'a> {
    pub(crate) place: &'a Place<'a>,
    pub(crate) config: &'a Config,
    pub(crate) shared: &'a Shared,
    pub(crate) running: &'a Running,
    pub(crate) telemetry: &'a Telemetry,
}

impl Serving<'_> {
    /// Serves clients until the phase ends that, and until accepted requests are answered.
    pub(crate) async fn run(
        self,
        predecessor: Option<Predecessor>,
        ingress: Ingress,
        sockets: Vec<PassableSocket>,
        unclaimed: Inherited,
        repository: Arc<Repository>,
    ) -> Result<(), Failed> {
        let phase = &self.shared.phase;
        tokio::select! {
            ready = self.get_ready(predecessor, &ingress) => ready?,
            () = reached(phase.subscribe(), |phase| phase.has_ended()) => return Ok(()),
        }
        sockets.iter().for_each(PassableSocket::retain);
        unclaimed.remove_unclaimed();
        let run_dir = self.place.run_dir.path().display();
        tracing::info!(models = self.config.models.len(), %run_dir, "serving");
        systemd::serving();
        phase.send_if_modified(|phase| {
            let starts = matches!(phase, Phase::Starting | Phase::TakingOver);
            if starts {
                *phase = Phase::Serving;
            }
            starts
        });
        let recorders =
            (self.telemetry.tracer.clone(), self.telemetry.access_log.as_ref().map(AccessLogWriter::log));
        ingress.run(Arc::clone(&self.running.router), repository, recorders, phase.subscribe()).await;
        if *phase.borrow() == Phase::Leaving {
            // Requests of the previous supervisor's clients pass through this supervisor to the next one.
            self.shared.predecessor_gone.cancelled().await;
        }
        Ok(())
    }

    /// Takes over from the previous supervisor, or waits for the models if `start: strict` requires it.
    async fn get_ready(&self, predecessor: Option<Predecessor>, ingress: &Ingress) -> Result<(), Failed> {
        match predecessor {
            Some(predecessor) => self.take_over(predecessor, ingress).await,
            None if self.config.strict_start => {
                let models = Arc::clone(&self.running.models.borrow());
                all_ready(&models.served).await
            }
            None => Ok(()),
        }
    }

    async fn take_over(&self, predecessor: Predecessor, ingress: &Ingress) -> Result<(), Failed> {
        let Shared { admin, registry, gpus, predecessor_gone, .. } = self.shared;
        let mut conversation = predecessor
            .converse(predecessor_gone.clone(), registry.clone())
            .map_err(|error| unavailable("cannot communicate with the previous supervisor", &error))?;
        if let Some(FinalState { drained, drained_models, regions }) =
            conversation.take_over(&self.running.state).await
        {
            let router = &self.running.router;
            router.drain(None, drained);
            for name in &drained_models {
                router.drain(Some(name), true);
            }
            ingress.shared_memory().take_over(regions);
        }
        gpus.iter().for_each(|gpu| gpu.keep());
        if let Err(error) = admin.history.take(&self.place.run_dir.history()) {
            tracing::warn!(
                %error,
                "cannot read the previous supervisor's history; the page's charts start empty"
            );
        }
        Ok(())
    }
}
