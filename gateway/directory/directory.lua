-- The directory in Redis: tenants and keys, and which of them changed when.
--
-- KEYS  1 state    hash: epoch (a name of this directory), version (the number of changes), floor (of the
--                  changes that the log has forgotten), keys and tenants (how many there are), lost (the epoch
--                  of a directory that was here)
--       2 log      list: one text `head:kind/id` for each change after `floor`; head is a random name of it
--       3 keys     hash: id -> JSON
--       4 tenants  hash: id -> JSON
--       5 keys in order      sorted set of `tenant/id`
--       6 tenants in order   sorted set of ids
-- ARGV  1 the operation; the rest is its arguments
--
-- A reply begins with the server's time in ms.

local LOG_MAX = 10000
local RECENT_MAX = 1000  -- changes among which a repeated one is looked for: the latest

local STATE, LOG = KEYS[1], KEYS[2]
local HASH = {keys = KEYS[3], tenants = KEYS[4]}
local ORDER = {keys = KEYS[5], tenants = KEYS[6]}

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function head_at(version, floor)
  if version == 0 then return '' end
  local entry = redis.call('LINDEX', LOG, version - floor - 1)
  return entry and string.match(entry, '^[^:]*') or nil
end

-- since EPOCH VERSION HEAD LIMIT: the changes after a place that the caller has reached.
local function since(epoch_known, version_known, head_known, limit)
  local state = redis.call('HMGET', STATE, 'epoch', 'version', 'floor', 'lost', 'keys', 'tenants')
  local epoch, version, floor = state[1], tonumber(state[2] or 0), tonumber(state[3] or 0)
  if not epoch then
    -- A gateway that starts later must not take a directory that was lost for an empty one.
    if epoch_known ~= '' then redis.call('HSET', STATE, 'lost', epoch_known) end
    if epoch_known ~= '' or state[4] then return {now_ms, 'lost'} end
    return {now_ms, 'load', '', 0, ''}
  end
  if epoch_known ~= '' and epoch_known ~= epoch then return {now_ms, 'lost'} end
  -- A server that may evict keys has taken a whole hash.
  for kind, at in pairs({keys = 5, tenants = 6}) do
    if redis.call('HLEN', HASH[kind]) < tonumber(state[at] or 0) then return {now_ms, 'lost'} end
  end
  version_known = tonumber(version_known)
  local is_known = epoch_known == epoch and version_known >= floor and version_known <= version
    and head_known == (head_at(version_known, floor) or false)
  if not is_known then return {now_ms, 'load', epoch, version, head_at(version, floor) or ''} end
  local changes = redis.call('LRANGE', LOG, version_known - floor, version_known - floor + limit - 1)
  local reply = {now_ms, 'changes', epoch, version_known + #changes, head_known}
  for _, change in ipairs(changes) do
    local kind, id = string.match(change, '^[^:]*:(%a+)/(.*)$')
    reply[5] = string.match(change, '^[^:]*')
    if kind and HASH[kind] then
      reply[#reply + 1] = kind
      reply[#reply + 1] = id
      reply[#reply + 1] = redis.call('HGET', HASH[kind], id) or ''
    end
  end
  return reply
end

-- scan KIND CURSOR COUNT: some of the entries, in no order.
local function scan(kind, cursor, count)
  local found = redis.call('HSCAN', HASH[kind], cursor, 'COUNT', count)
  local reply = {now_ms, found[1]}
  for _, word in ipairs(found[2]) do reply[#reply + 1] = word end
  return reply
end

-- list KIND TENANT AFTER LIMIT: entries in order.
local function list(kind, tenant, after, limit)
  local first, last = '-', '+'
  if tenant ~= '' then first, last = '[' .. tenant .. '/', '(' .. tenant .. '0' end
  if after ~= '' and (tenant == '' or after > tenant .. '/') then first = '(' .. after end
  local reply = {now_ms}
  for _, place in ipairs(redis.call('ZRANGEBYLEX', ORDER[kind], first, last, 'LIMIT', 0, limit)) do
    local id = string.match(place, '[^/]*$')
    reply[#reply + 1] = place
    reply[#reply + 1] = redis.call('HGET', HASH[kind], id) or ''
  end
  return reply
end

-- put KIND ID EXPECTED JSON PLACE TENANT EPOCH NEW_EPOCH HEAD COUNT_MAX NOT_AFTER_MS: replace an entry if it
-- is EXPECTED. An empty JSON is no entry. An empty EPOCH is whichever there is, an empty TENANT one that is
-- elsewhere. One that comes again, since its answer was lost, is known by its HEAD, and changes nothing more:
-- others may have changed the entry since.
local function put(
  kind, id, expected, json, place, tenant, epoch_known, new_epoch, head, count_max, not_after_ms
)
  local epoch = redis.call('HGET', STATE, 'epoch')
  if epoch_known ~= '' and epoch_known ~= epoch then return {now_ms, 'lost'} end
  if not epoch and redis.call('HEXISTS', STATE, 'lost') == 1 then return {now_ms, 'lost'} end
  local change = head .. ':' .. kind .. '/' .. id
  if redis.call('LPOS', LOG, change, 'RANK', -1, 'MAXLEN', RECENT_MAX) then return {now_ms, 'ok'} end
  if now_ms > tonumber(not_after_ms) then return {now_ms, 'late'} end
  local current = redis.call('HGET', HASH[kind], id) or ''
  if current ~= expected then return {now_ms, 'changed'} end
  if json == '' then
    local keys = kind == 'tenants' and
      redis.call('ZRANGEBYLEX', ORDER.keys, '[' .. id .. '/', '(' .. id .. '0', 'LIMIT', 0, 1) or {}
    if #keys > 0 then return {now_ms, 'used'} end
    redis.call('HDEL', HASH[kind], id)
    redis.call('ZREM', ORDER[kind], place)
    if current ~= '' then redis.call('HINCRBY', STATE, kind, -1) end
  else
    if current == '' and redis.call('HLEN', HASH[kind]) >= tonumber(count_max) then return {now_ms, 'full'} end
    if tenant ~= '' and redis.call('HEXISTS', HASH.tenants, tenant) == 0 then return {now_ms, 'tenant'} end
    redis.call('HSET', HASH[kind], id, json)
    redis.call('ZADD', ORDER[kind], 0, place)
    if current == '' then redis.call('HINCRBY', STATE, kind, 1) end
  end
  if not epoch then redis.call('HSET', STATE, 'epoch', new_epoch, 'version', 0, 'floor', 0) end
  redis.call('HINCRBY', STATE, 'version', 1)
  redis.call('RPUSH', LOG, change)
  if redis.call('LLEN', LOG) > LOG_MAX then
    redis.call('LPOP', LOG)
    redis.call('HINCRBY', STATE, 'floor', 1)
  end
  return {now_ms, 'ok'}
end

local operation = ARGV[1]
if operation == 'since' then return since(ARGV[2], ARGV[3], ARGV[4], ARGV[5]) end
if operation == 'scan' then return scan(ARGV[2], ARGV[3], ARGV[4]) end
if operation == 'list' then return list(ARGV[2], ARGV[3], ARGV[4], ARGV[5]) end
if operation == 'get' then return {now_ms, redis.call('HGET', HASH[ARGV[2]], ARGV[3]) or ''} end
if operation == 'put' then return put(unpack(ARGV, 2)) end
return {now_ms}  -- a probe
