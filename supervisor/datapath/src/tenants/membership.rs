//! The tenants to which requests belong.

use std::sync::Arc;

use http::{HeaderMap, HeaderName};
use shadowslice_config::{DEFAULT_TENANT, TenantsConfig};

use super::{TenantId, TenantPlace, TenantRefusal, Tenants};
use crate::peer::{Peer, PeerSet, UnknownAccount};

/// The rules that assign requests to tenants.
#[derive(Debug)]
pub struct TenantMembership {
    tenants: Arc<Tenants>,
    members: Vec<TenantMembers>,
    header: Option<TrustedHeader>,
}

#[derive(Debug)]
struct TenantMembers {
    tenant: TenantId,
    peers: PeerSet,
}

#[derive(Debug)]
struct TrustedHeader {
    name: HeaderName,
    proxies: PeerSet,
}

impl TenantMembership {
    /// Looks up the members of the tenants.
    ///
    /// # Errors
    ///
    /// Returns an error if this host does not have a user or group.
    pub fn new(config: &TenantsConfig, tenants: Arc<Tenants>) -> Result<Self, UnknownAccount> {
        let mut members = Vec::new();
        for tenant in config.list.iter().filter(|tenant| tenant.name != DEFAULT_TENANT) {
            let peers = match &tenant.members {
                Some(members) => PeerSet::look_up(members)?,
                None => PeerSet::named(&tenant.name),
            };
            let tenant = tenants.find(&tenant.name).unwrap_or_default();
            members.push(TenantMembers { tenant, peers });
        }
        let header = match &config.header {
            Some(header) => {
                Some(TrustedHeader { name: header.name.clone(), proxies: PeerSet::look_up(&header.trusted)? })
            }
            None => None,
        };
        Ok(Self { tenants, members, header })
    }

    /// Creates the rules for a server with only the default tenant.
    pub fn single() -> Self {
        let config = TenantsConfig::default();
        Self { tenants: Tenants::new(&config), members: Vec::new(), header: None }
    }

    /// Returns the tenant of a request. A trusted proxy names it in a header. For an unknown name, the
    /// request belongs to the default tenant.
    pub fn tenant(&self, peer: &Peer, headers: &HeaderMap) -> TenantId {
        self.named(peer, headers).or_else(|| self.of(peer)).unwrap_or_default()
    }

    /// Returns a place for a request, or `None` if there is only one tenant without limits.
    ///
    /// # Errors
    ///
    /// Returns an error if the request exceeds a limit of the tenant.
    pub fn admit(&self, tenant: TenantId) -> Result<Option<TenantPlace>, TenantRefusal> {
        if self.tenants.is_trivial() {
            return Ok(None);
        }
        self.tenants.admit(tenant).map(Some)
    }

    /// Returns the tenant that a trusted proxy names, or `None` if it names none.
    fn named(&self, peer: &Peer, headers: &HeaderMap) -> Option<TenantId> {
        let TrustedHeader { name, proxies } = self.header.as_ref()?;
        let given = headers.get(name).filter(|_| proxies.contains(peer))?;
        Some(given.to_str().ok().and_then(|name| self.tenants.find(name)).unwrap_or_default())
    }

    fn of(&self, peer: &Peer) -> Option<TenantId> {
        self.members.iter().find(|members| members.peers.contains(peer)).map(|members| members.tenant)
    }
}

#[cfg(test)]
mod tests {
    use shadowslice_config::{Peers, TenantConfig, TenantHeader};

    use super::*;

    fn tenant(name: &str, clients: &[&str]) -> TenantConfig {
        let members =
            Peers { clients: clients.iter().map(|&name| name.to_owned()).collect(), ..Peers::default() };
        let members = (!clients.is_empty()).then_some(members);
        TenantConfig { name: name.to_owned(), weight: 1.0, rate: None, in_flight: None, members }
    }

    fn peer(names: &[&str]) -> Peer {
        let names = names.iter().map(|&name| name.to_owned()).collect();
        Peer::Tcp { address: ([127, 0, 0, 1], 9).into(), names }
    }

    #[test]
    fn a_client_belongs_to_the_tenant_that_lists_it_and_a_proxy_names_the_tenant() {
        let trusted = Peers { clients: vec!["gateway".to_owned()], ..Peers::default() };
        let header = Some(TenantHeader { name: HeaderName::from_static("x-tenant"), trusted });
        let config =
            TenantsConfig { list: vec![tenant("search", &[]), tenant("ads", &["web", "app"])], header };
        let tenants = Tenants::new(&config);
        let membership = TenantMembership::new(&config, Arc::clone(&tenants)).unwrap();
        let name = |names: &[&str], header: Option<&str>| {
            let headers = header.map(|name| (HeaderName::from_static("x-tenant"), name.parse().unwrap()));
            let tenant = membership.tenant(&peer(names), &headers.into_iter().collect());
            tenants.report().nth(tenant.index()).map(|report| report.name.to_owned()).unwrap()
        };
        assert_eq!(name(&["search"], None), "search", "by its own name");
        assert_eq!(name(&["x", "app"], None), "ads");
        assert_eq!(name(&["ads"], None), "default", "the tenant has a list of members");
        assert_eq!(name(&[], None), "default");
        assert_eq!(name(&["app"], Some("search")), "ads", "the client is not a trusted proxy");
        assert_eq!(name(&["gateway"], Some("search")), "search");
        assert_eq!(name(&["gateway"], Some("unknown")), "default");
        assert_eq!(name(&["gateway"], None), "default");
    }

    #[test]
    fn a_unix_user_can_be_a_tenant() {
        let config = TenantsConfig { list: vec![tenant("root", &[])], header: None };
        let tenants = Tenants::new(&config);
        let membership = TenantMembership::new(&config, Arc::clone(&tenants)).unwrap();
        let of = |uid| {
            let peer = Peer::Unix { uid, groups: Vec::new(), pid: 1 };
            membership.tenant(&peer, &HeaderMap::new())
        };
        assert_eq!((of(0), of(70_001)), (TenantId(1), TenantId::DEFAULT));
    }
}
