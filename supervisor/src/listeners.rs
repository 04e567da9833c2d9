//! The listeners of the supervisor, which it creates or inherits from the previous supervisor.

use std::path::Path;
use std::sync::Arc;

use shadowslice_config::{Config, LimitsConfig, ListenConfig};
use shadowslice_control::host;
use shadowslice_datapath::peer::{Guard, Refusals};
use shadowslice_datapath::relay::RelayServer;
use shadowslice_datapath::sockets::{Inherited, PassableSocket};
use shadowslice_datapath::tenants::{TenantMembership, Tenants};
use shadowslice_ingress::{BindError, Ingress, MetricsListeners};
use shadowslice_operations::admin::Admin;
use shadowslice_succession::Predecessor;

use crate::serve::{Failed, unavailable};
use crate::tasks::BackgroundListeners;

pub(crate) struct Listeners {
    pub(crate) ingress: Ingress,
    pub(crate) background: BackgroundListeners,
    /// The clients that may load and unload models.
    pub(crate) model_control: Guard,
    pub(crate) refusals: Arc<Refusals>,
    /// All sockets, for the next supervisor.
    pub(crate) sockets: Vec<PassableSocket>,
    /// The inherited sockets that this supervisor does not use.
    pub(crate) unclaimed: Inherited,
}

impl Listeners {
    pub(crate) async fn bind(
        config: &Config,
        run_dir: &Path,
        tenants: Arc<Tenants>,
        predecessor: Option<&mut Predecessor>,
    ) -> Result<Self, Failed> {
        let connections = host::connections(config);
        let memory = Some(host::request_memory(&config.limits));
        let limits = LimitsConfig { connections, memory, ..config.limits.clone() };
        let refusals = Arc::new(Refusals::default());
        let model_control = Guard::of(&config.model_control, &refusals).map_err(|error| {
            unavailable("cannot give the users and groups in model_control access", &error)
        })?;
        let (mut inherited, relay) = match predecessor {
            Some(predecessor) => (std::mem::take(&mut predecessor.sockets), predecessor.relay.take()),
            None => (Inherited::default(), None),
        };
        let taken = |error: BindError| unavailable("cannot listen for requests", &error);
        let ListenConfig { http, grpc, metrics } = &config.listen;
        let membership = TenantMembership::new(&config.tenants, tenants)
            .map_err(|error| unavailable("cannot find the members of the tenants", &error))?;
        let ingress =
            Ingress::bind(http, grpc, &limits, membership, &mut inherited, &refusals).await.map_err(taken)?;
        let metrics = MetricsListeners::bind(metrics, &mut inherited, &refusals).await.map_err(taken)?;
        let admin = Admin::bind(run_dir, config.control.as_ref(), &mut inherited, &refusals)
            .map_err(|error| unavailable("cannot listen on the control socket", &error))?;
        let relays = relay.map(RelayServer::listen).transpose().map_err(|error| {
            unavailable("cannot listen for requests from the previous supervisor", &error)
        })?;
        let sockets = [ingress.passable(), metrics.passable(), vec![admin.passable()]].concat();
        let background = BackgroundListeners { metrics, admin, relays };
        Ok(Self { ingress, background, model_control, refusals, sockets, unclaimed: inherited })
    }
}
